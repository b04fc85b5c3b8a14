"""Leases: names that one object at a time holds, in the whole runtime, and numbers that fence off earlier holders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.coordinator_services import LeaseGrant, LeaseRefusal, LeaseRequest
from actors.errors import InvalidOption, LeaseHeld, LeaseLost, StaleLease
from actors.toolkit.capability import Capability
from actors.toolkit.coordinator_asks import ask_coordinator
from timers.lease_guards import GuardRow, raise_guard
from timers.leases import Holder
from timers.schedule import parse_duration_ms

__all__ = ["Lease", "Leases"]


@dataclass(frozen=True)
class Lease:
    """A lease that was held when it was given. Can be stored, and sent along with calls.

    `epoch` is the fencing token: every grant of the name has a higher one than all before it, also after release and
    expiry. Times are epoch ms: the lease ends at `expires_ms` by the coordinator's clock; begin nothing under it after
    `usable_until_ms`, which leaves `lease_margin_ms` for clocks that differ and commits that wait.
    """

    name: str
    epoch: int
    expires_ms: int
    usable_until_ms: int
    ttl_ms: int


class Leases(Capability):
    """`self.leases`: `acquire`, `renew`, `release`; `guard` in what a lease protects.

    A lease is held by the object, not by the turn: a turn that raises does not give it back, and the next turn of the
    object finds it held. The coordinator keeps it. While that is away, the three that ask it wait and then raise
    `CoordinatorUnavailable`.
    """

    __slots__ = ()

    async def acquire(self, name: str, ttl: Any = None) -> Lease:
        """Take the lease for `ttl` ("30s", a timedelta, milliseconds; default `lease_ttl_ms`).

        It is given when nobody holds it or its time is over, under a higher epoch than ever before. An object that
        holds it already takes it anew: its earlier epoch is worth nothing then. The same turn run again gets the same
        lease.

        Raises `LeaseHeld`, which says by whom and until when, `InvalidOption`, `CoordinatorUnavailable`.
        """
        name, ttl_ms = self._check_name(name, "name"), self._ttl_ms(ttl)
        holder = self._holder
        answer: LeaseGrant | LeaseRefusal = await ask_coordinator(
            self._host.writing_turn(),
            f"acquire lease {name}",
            lambda coordinator, request_id: coordinator.acquire_lease(LeaseRequest(name, holder, request_id, ttl_ms)),
        )
        if isinstance(answer, LeaseRefusal):
            raise LeaseHeld(
                f"{self._host.id}: the lease {name!r} is held by {answer.holder_class}/{answer.holder_key} until "
                f"{answer.until_ms} (epoch ms) unless it is renewed: try again later, from a timer for example",
                (answer.holder_class, answer.holder_key),
                answer.until_ms,
            )
        return self._lease(name, answer, ttl_ms)

    async def renew(self, lease: Lease, ttl: Any = None) -> Lease:
        """The same lease, for `ttl` from now (default: as long as it was taken for), and never shorter than it was.

        One whose time is over can be renewed as long as nobody else has taken it. Raises `LeaseLost`, `InvalidOption`,
        `CoordinatorUnavailable`.
        """
        ttl_ms = lease.ttl_ms if ttl is None else self._ttl_ms(ttl)
        holder = self._holder
        grant: LeaseGrant | None = await ask_coordinator(
            self._host.writing_turn(),
            f"renew lease {lease.name} {lease.epoch}",
            lambda coordinator, _: coordinator.renew_lease(lease.name, holder, lease.epoch, ttl_ms),
        )
        if grant is None:
            raise LeaseLost(
                f"{self._host.id} does not hold the lease {lease.name!r} under epoch {lease.epoch} any more: it was "
                "released, or expired and was taken or removed. Acquire it again, and do over what rests on it."
            )
        return self._lease(lease.name, grant, ttl_ms)

    async def release(self, lease: Lease) -> None:
        """Give the lease back; nothing happens when it is not held any more. Raises `CoordinatorUnavailable`."""
        holder = self._holder
        await ask_coordinator(
            self._host.writing_turn(),
            f"release lease {lease.name} {lease.epoch}",
            lambda coordinator, _: coordinator.release_lease(lease.name, holder, lease.epoch),
        )

    def guard(self, name: str, epoch: int) -> None:
        """In the object that a lease protects: refuse whoever comes with an epoch that is not the latest seen here.

        The highest epoch is part of this turn's commit, and forgotten with the object when that is deleted. Raises
        `StaleLease` for a lower one, `InvalidOption`.
        """
        name = self._check_name(name, "name")
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 1:
            raise InvalidOption(f"{self._host.id}: epoch = {epoch!r}: must be the `epoch` of a Lease")
        known = self._rows.get(GuardRow, name)
        batch = raise_guard(known, GuardRow(self._rows.oid, name, epoch))
        if batch is None:
            assert known is not None
            raise StaleLease(
                f"{self._host.id}: epoch {epoch} of the lease {name!r} is over, epoch {known.epoch} has been here: "
                "whoever sent this has lost the lease"
            )
        self._rows.apply(batch)

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _holder(self) -> Holder:
        return Holder(self._host.id.type_name, self._host.id.key)

    def _lease(self, name: str, grant: LeaseGrant, ttl_ms: int) -> Lease:
        usable_until_ms = grant.expires_ms - self._settings.lease_margin_ms
        return Lease(name, grant.epoch, grant.expires_ms, usable_until_ms, ttl_ms)

    def _ttl_ms(self, ttl: Any) -> int:
        settings = self._settings
        if ttl is None:
            return settings.lease_ttl_ms
        ttl_ms = ttl if isinstance(ttl, int) and not isinstance(ttl, bool) else parse_duration_ms(ttl)
        if not settings.least_lease_ttl_ms < ttl_ms <= settings.max_lease_ttl_ms:
            raise InvalidOption(
                f"{self._host.id}: ttl = {ttl!r}: must be more than {settings.least_lease_ttl_ms:,} ms "
                f"(`lease_margin_ms` and `lease_min_usable_ms`) and at most {settings.max_lease_ttl_ms:,} ms "
                "(`max_lease_ttl_ms`)"
            )
        return ttl_ms
