"""Which machine this process runs on."""

from __future__ import annotations

import socket
from pathlib import Path

__all__ = ["node_identity"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_identity(hostname: str | None = None, boot_id_file: Path = _BOOT_ID) -> str:
    """The same for all processes that can meet at a Unix socket: host name and boot id.

    Containers of one machine share the boot id and differ in the host name. Ray's own node id does not serve: it
    is new at each start of Ray, and two Rays on one machine have two.
    """
    name = socket.gethostname() if hostname is None else hostname
    try:
        boot_id = boot_id_file.read_text().strip()
    except OSError:  # not Linux: the host name alone must do
        boot_id = "unknown"
    return f"{name}/{boot_id}"
