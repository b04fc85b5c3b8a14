"""Timer core."""
