"""One short example for each part of the toolkit. `python -m examples.toolkit.NAME` runs one."""
