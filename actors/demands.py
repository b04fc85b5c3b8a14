"""What partitions' processes ask of Ray: what they reserve, and the environment that they run in."""

from __future__ import annotations

import inspect
import json
import logging
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray._private.runtime_env.py_modules import upload_py_modules_if_needed
from ray._private.runtime_env.working_dir import upload_working_dir_if_needed
from ray.runtime_env import RuntimeEnv

from actors.errors import InvalidOption

__all__ = ["Demands", "ship"]

#: Ray has arguments of their own for these.
_OWN_ARGUMENTS = frozenset({"CPU", "GPU", "memory", "object_store_memory"})

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Demands:
    """Of each partition. `runtime_env` is Ray's, with packages by their URIs only; None: that of whoever starts it."""

    num_cpus: float = 0
    memory_bytes: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] | None = None

    @classmethod
    def checked(cls, num_cpus: float, memory_bytes: int, resources: Mapping[str, float] | None) -> Demands:
        """Without a `runtime_env`. Raises `InvalidOption`."""
        _check_quantity("num_cpus", num_cpus, least=0)
        if isinstance(memory_bytes, bool) or not isinstance(memory_bytes, int) or memory_bytes < 0:
            raise InvalidOption(f"memory_bytes = {memory_bytes!r}: must be a whole number of bytes, 0 for no limit")
        if resources is not None and not isinstance(resources, Mapping):
            raise InvalidOption(f"resources = {resources!r}: must map names of resources to quantities")
        for name, quantity in (resources or {}).items():
            if not isinstance(name, str) or not name or name in _OWN_ARGUMENTS:
                raise InvalidOption(
                    f"resources = {resources!r}: {name!r} is no name of a resource of your own; CPUs and memory have "
                    "the arguments num_cpus and memory_bytes"
                )
            _check_quantity(f"resources[{name!r}]", quantity, least=0)
        return cls(num_cpus, memory_bytes, dict(resources or {}))

    def with_environment(self, runtime_env: Mapping[str, Any] | None) -> Demands:
        """The same in another environment; see `ship`."""
        return replace(self, runtime_env=runtime_env)

    def options(self) -> dict[str, Any]:
        """As Ray's actor options."""
        options: dict[str, Any] = {"num_cpus": self.num_cpus}
        if self.memory_bytes:
            options["memory"] = self.memory_bytes
        if self.resources:
            options["resources"] = dict(self.resources)
        if self.runtime_env:
            options["runtime_env"] = dict(self.runtime_env)
        return options

    def __str__(self) -> str:
        return ", ".join(f"{name} = {value!r}" for name, value in self.options().items())


def _check_quantity(name: str, quantity: object, least: float) -> None:
    is_number = isinstance(quantity, int | float) and not isinstance(quantity, bool) and math.isfinite(quantity)
    if not is_number or not isinstance(quantity, int | float) or quantity < least:
        raise InvalidOption(f"{name} = {quantity!r}: must be a number of at least {least:g}")
    if quantity > 1 and quantity != int(quantity):
        raise InvalidOption(f"{name} = {quantity!r}: Ray takes fractions only below 1")


def ship(runtime_env: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """An environment that any process of the cluster can hand to Ray: directories are uploaded and become URIs.

    What this process's own connection to Ray has (`ray.init(runtime_env=...)`) belongs to it too. None when there is
    neither. This process must be connected. Raises `InvalidOption`.
    """
    if runtime_env is not None and not isinstance(runtime_env, Mapping):
        raise InvalidOption(f"runtime_env = {runtime_env!r}: must be a mapping, as ray.init takes it")
    given = dict(runtime_env or {})
    try:
        for upload in (upload_py_modules_if_needed, upload_working_dir_if_needed):
            given = _uploaded(upload, given)
        given.pop("excludes", None)  # only said what was to be uploaded
        whole = {**ray.get_runtime_context().runtime_env, **given}
        plain: dict[str, Any] = RuntimeEnv(**whole).to_dict()
        json.dumps(plain)  # it is kept as text
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise InvalidOption(f"runtime_env = {runtime_env!r}: {error}") from error
    return plain or None


def _uploaded(upload: Callable[..., Any], runtime_env: dict[str, Any]) -> dict[str, Any]:
    """As `ray.init` does it: only there Ray takes directories, and this process may have been connected long since."""
    options: dict[str, Any] = {"logger": _log}
    if "include_gitignore" in inspect.signature(upload).parameters:
        options["include_gitignore"] = True
    with tempfile.TemporaryDirectory(prefix="mainspring-") as scratch:
        uploaded: dict[str, Any] = upload(runtime_env, scratch_dir=scratch, **options)
    return uploaded
