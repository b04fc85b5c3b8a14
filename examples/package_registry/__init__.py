"""An artifact registry for the distributions installed here. Run it: `python -m examples.package_registry`."""
