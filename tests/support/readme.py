"""The code blocks of README.md as the files that their first lines name."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["ROOT", "write_readme_files"]

ROOT = Path(__file__).resolve().parent.parent.parent


def write_readme_files(directory: Path) -> set[str]:
    """Write every Python block of the README into the directory; gives the names of the files."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    for code, name in blocks:
        (directory / name).write_text(code)
    return {name for _, name in blocks}
