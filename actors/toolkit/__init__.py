"""What the engine's timer kinds serve, as capabilities of an object."""
