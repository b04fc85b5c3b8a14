"""Applications to read and to run: start with `quickstart`, then `package_registry`."""
