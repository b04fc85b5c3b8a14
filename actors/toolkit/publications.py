"""Publications of an object: items that become visible, in order, once everything that they need is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from actors.address import check_key
from actors.errors import (
    AdvanceConflict,
    AdvanceTooLarge,
    DuplicateItem,
    InvalidOption,
    TooManyAdvances,
    UnknownAdvance,
)
from actors.toolkit.capability import Capability
from actors.toolkit.publication_hook import HOOK
from timers.batch import Batch, Put
from timers.publication_plans import change, clear, make, recheck_timer, release
from timers.publication_rows import AdvanceRow, Clearance, Contents, ItemRow, LineRow, Need, StateRow, advance_ref

__all__ = ["DEFAULT_LINE", "Advance", "AdvanceState", "NeededItem", "Publications"]

AdvanceState = Literal["pending", "cleared", "published", "held", "hit", "resolved"]
#: An item of the object itself by its name, or (class or its type name, key, item) of another object.
NeededItem = str | tuple[Any, str, str]

#: The line that is meant when none is named.
DEFAULT_LINE: Final = "default"
#: UTF-8 bytes of a line's name, which is part of the timer table's key.
_MAX_LINE_BYTES: Final = 200
#: UTF-8 bytes of a class's `type_name`: 200 characters.
_MAX_TYPE_NAME_BYTES: Final = 800
#: UTF-8 bytes of an item's name.
_MAX_ITEM_BYTES: Final = 512
#: Advances that `list` gives at a time when nothing else is said.
_PAGE: Final = 100

_STATES: Final[dict[int, AdvanceState]] = {
    Clearance.PENDING: "pending",
    Clearance.CLEARED: "cleared",
    Clearance.HELD: "held",
    Clearance.HIT: "hit",
    Clearance.RESOLVED: "resolved",
}


@dataclass(frozen=True)
class Advance:
    """One advance of a publication line, as the turn sees it.

    `state`: "pending" (waits for what it needs), "cleared" or "resolved" (waits only for the advances before it),
    "published", "held" or "hit". `waiting_for`: of a pending advance, the needed items that are not known to be
    published; those of other objects as of the last look, which ends at the first that is missing. `behind`: the
    advance of the line that has to become publishable first. Needed items of other objects are (type name, key, item).
    Times are epoch ms.
    """

    line: str
    sequence: int
    state: AdvanceState
    items: tuple[str, ...]
    depends_on: tuple[str | tuple[str, str, str], ...]
    external: tuple[str | tuple[str, str, str], ...]
    waiting_for: tuple[str | tuple[str, str, str], ...]
    behind: int | None
    created_ms: int


class Publications(Capability):
    """`self.publications` of an object. Part of the running turn, like storage.

    An item is a name that the object publishes once. Items are added by numbered *advances* of a line. An advance is
    published once everything that it needs is published and every advance before it in its line is publishable; from
    then on `is_published` says so for all its items, to this object and to those that depend on them. What is
    published stays published.

    Two advances that wait for each other, directly or over others, stay pending for ever: `waiting_for` shows what each
    of them lacks, and `resolve` lets one of them pass. So does an advance that needs an item of a later advance of its
    own line.
    """

    __slots__ = ()

    # --- changes ----------------------------------------------------------------------------------

    def advance(
        self,
        line: str = DEFAULT_LINE,
        *,
        items: Iterable[str] = (),
        depends_on: Iterable[NeededItem] = (),
        external: Iterable[NeededItem] = (),
    ) -> Advance:
        """Add items to a line. They are published in this commit when nothing that can be seen here stands in the way,
        otherwise as soon as it is out of the way.

        `depends_on`: items that must be published before or with these, by name or as (class, key, item) of another
        object. `external`: the same, but what this advance adds itself does not count.

        Raises `DuplicateItem`, `TooManyAdvances`, `AdvanceTooLarge`, `InvalidOption`, `InvalidKey`.
        """
        self._host.writing_turn()
        row = self._line(line) or LineRow(self._rows.oid, _checked_text("a line", line, _MAX_LINE_BYTES))
        unpublished = row.next_sequence - 1 - row.published
        most = self._settings.max_unpublished_advances
        if unpublished >= most:
            raise TooManyAdvances(
                f"line {line!r} of {self._host.id} has {unpublished} unpublished advances (limit {most}): "
                "wait until the first of them is published, or use another line"
            )
        contents = self._contents(row, items, depends_on, external)
        for batch in make(row, contents, self._rows.now_ms, hooked=hasattr(self._host.info.cls, HOOK)):
            self._rows.apply(batch)
        self._clear_or_arm(*self._stored(line, contents.sequence), contents)
        return self._shown(line, contents.sequence)

    def hold(self, sequence: int, line: str = DEFAULT_LINE) -> Advance:
        """Keep an unpublished advance, and with it those behind it, from being published until `release`.

        Raises `UnknownAdvance`, `AdvanceConflict` when it is published or a hit.
        """
        return self._keep_back(sequence, line, Clearance.HELD, ("pending", "cleared", "resolved", "held"))

    def mark_hit(self, sequence: int, line: str = DEFAULT_LINE) -> Advance:
        """The same because something was found against it: only `release` or `resolve` lets it go on.

        Raises `UnknownAdvance`, `AdvanceConflict` when it is published.
        """
        return self._keep_back(sequence, line, Clearance.HIT, ("pending", "cleared", "resolved", "held", "hit"))

    def release(self, sequence: int, line: str = DEFAULT_LINE) -> Advance:
        """A held or hit advance is pending again, and published once everything that it needs is.

        Raises `UnknownAdvance`, `AdvanceConflict` when it is neither held nor a hit.
        """
        self._host.writing_turn()
        row, state = self._stored(line, sequence)
        self._expect(row, state, ("held", "hit"), "release")
        self._rows.apply(release(row, state))
        self._clear_or_arm(*self._stored(line, sequence), self._advance_contents(state))
        return self._shown(line, sequence)

    def resolve(self, sequence: int, line: str = DEFAULT_LINE) -> Advance:
        """Let an unpublished advance pass, whatever it needs and whatever was found against it.

        It is published once every advance before it in its line is publishable.
        Raises `UnknownAdvance`, `AdvanceConflict` when it is published.
        """
        self._host.writing_turn()
        row, state = self._stored(line, sequence)
        self._expect(row, state, ("pending", "cleared", "resolved", "held", "hit"), "resolve")
        if not state.publishable:
            self._clear(row, state, Clearance.RESOLVED)
        return self._shown(line, sequence)

    # --- reads ------------------------------------------------------------------------------------

    def is_published(self, item: str) -> bool:
        """Whether this object has published the item."""
        row = self._rows.get(ItemRow, item)
        line = None if row is None else self._line(row.line)
        return row is not None and line is not None and row.sequence <= line.published

    def state(self, sequence: int, line: str = DEFAULT_LINE) -> AdvanceState:
        """The state of one advance. Raises `UnknownAdvance`."""
        return _state_of(*self._stored(line, sequence))

    def get(self, sequence: int, line: str = DEFAULT_LINE) -> Advance:
        """One advance. Raises `UnknownAdvance`."""
        return self._shown(line, sequence)

    def list(self, line: str = DEFAULT_LINE, *, after: int = 0, limit: int = _PAGE) -> list[Advance]:
        """Advances of a line in order, from the one after number `after` on; at most `limit`."""
        row = self._line(line)
        last = 0 if row is None else row.next_sequence - 1
        return [self._shown(line, sequence) for sequence in range(max(after, 0) + 1, min(last, after + limit) + 1)]

    def published_up_to(self, line: str = DEFAULT_LINE) -> int:
        """All advances of the line up to this number are published; 0: none is."""
        row = self._line(line)
        return 0 if row is None else row.published

    # --- clearing ---------------------------------------------------------------------------------

    def _clear_or_arm(self, line: LineRow, state: StateRow, contents: Contents) -> None:
        """Publish in this commit when nothing is missing that can be seen here; else its timer looks again, at once."""
        if all(need.is_local and self.is_published(need.item) for need in contents.needed()):
            self._clear(line, state, Clearance.CLEARED)
            return
        timer = recheck_timer(line, state, contents.to_bytes(), self._rows.now_ms)
        self._rows.apply(Batch(writes=(Put(timer),)))

    def _clear(self, line: LineRow, state: StateRow, clearance: Clearance) -> None:
        run = []
        for sequence in range(line.published + 1, line.next_sequence):
            each = self._stored(line.line, sequence)[1]
            run.append(each)
            if each != state and not each.publishable:
                break
        self._rows.apply(clear(line, state, run, self._rows.now_ms, clearance))

    def _keep_back(self, sequence: int, line: str, clearance: Clearance, allowed: tuple[AdvanceState, ...]) -> Advance:
        self._host.writing_turn()
        row, state = self._stored(line, sequence)
        self._expect(row, state, allowed, "hold" if clearance is Clearance.HELD else "mark_hit")
        if state.clearance != clearance:
            self._rows.apply(change(row, state, clearance))
        return self._shown(line, sequence)

    # --- rows -------------------------------------------------------------------------------------

    def _line(self, line: str) -> LineRow | None:
        return self._rows.get(LineRow, line)

    def _stored(self, line: str, sequence: int) -> tuple[LineRow, StateRow]:
        row = self._line(line)
        state = None if row is None else self._rows.get(StateRow, line, sequence)
        if row is None or state is None:
            raise UnknownAdvance(f"line {line!r} of {self._host.id} has no advance {sequence!r}")
        return row, state

    def _advance_row(self, state: StateRow) -> AdvanceRow:
        row = self._rows.get(AdvanceRow, state.line, state.sequence)
        assert row is not None  # written with the state, and removed with it
        return row

    def _advance_contents(self, state: StateRow) -> Contents:
        return Contents.from_bytes(self._advance_row(state).contents)

    def _expect(self, line: LineRow, state: StateRow, allowed: Sequence[AdvanceState], what: str) -> None:
        found = _state_of(line, state)
        if found not in allowed:
            raise AdvanceConflict(
                f"{what}: advance {state.sequence} of line {line.line!r} of {self._host.id} is {found}, "
                f"which is none of: {', '.join(allowed)}"
            )

    def _shown(self, line: str, sequence: int) -> Advance:
        row, state = self._stored(line, sequence)
        stored = self._advance_row(state)
        contents = Contents.from_bytes(stored.contents)
        shown = _state_of(row, state)
        return Advance(
            line,
            sequence,
            shown,
            contents.items,
            tuple(map(_shown_need, contents.depends_on)),
            tuple(map(_shown_need, contents.external)),
            tuple(map(_shown_need, self._missing(state, contents))) if shown == "pending" else (),
            None if shown == "published" else self._behind(row, sequence),
            stored.created_ms,
        )

    def _missing(self, state: StateRow, contents: Contents) -> Sequence[Need]:
        needed = contents.needed()
        local = [need for need in needed if need.is_local]
        seen = self._host.partition.publications.hints.position(advance_ref(*state.key()))
        return [need for need in local if not self.is_published(need.item)] + needed[len(local) + seen :]

    def _behind(self, line: LineRow, sequence: int) -> int | None:
        for earlier in range(line.published + 1, sequence):
            if not self._stored(line.line, earlier)[1].publishable:
                return earlier
        return None

    # --- what the application gives ---------------------------------------------------------------

    def _contents(
        self, line: LineRow, items: Iterable[str], depends_on: Iterable[NeededItem], external: Iterable[NeededItem]
    ) -> Contents:
        if isinstance(items, str):
            raise InvalidOption(f"items are several names, not one text: [{items!r}]")
        names = tuple(sorted({_checked_text("an item", item, _MAX_ITEM_BYTES) for item in items}))
        for name in names:
            known = self._rows.get(ItemRow, name)
            if known is not None:
                raise DuplicateItem(
                    f"{self._host.id}: item {name!r} was added by advance {known.sequence} of line {known.line!r}"
                )
        contents = Contents(
            line.line,
            line.next_sequence,
            names,
            self._needs("depends_on", depends_on),
            self._needs("external", external),
        )
        self._check_size(contents)
        return contents

    def _check_size(self, contents: Contents) -> None:
        settings = self._settings
        most = settings.max_advance_items
        groups = {"items": contents.items, "dependencies": contents.depends_on, "external bases": contents.external}
        for what, group in groups.items():
            if len(group) > most:
                raise AdvanceTooLarge(
                    f"{self._host.id}: an advance with {len(group):,} {what} (limit {most:,}): make several of it"
                )
        size = len(contents.to_bytes())
        if size > settings.max_advance_bytes:
            raise AdvanceTooLarge(
                f"{self._host.id}: an advance of {size:,} bytes (limit {settings.max_advance_bytes:,}): "
                "make several of it, or use shorter names"
            )

    def _needs(self, what: str, given: Iterable[NeededItem]) -> tuple[Need, ...]:
        if isinstance(given, str):
            raise InvalidOption(f"{what} are several items, not one text: [{given!r}]")
        return tuple(sorted({self._need(each) for each in given}))

    def _need(self, given: NeededItem) -> Need:
        if isinstance(given, str):
            return Need("", "", _checked_text("an item", given, _MAX_ITEM_BYTES))
        if not isinstance(given, tuple | list) or len(given) != 3:
            raise InvalidOption(f"a needed item is a name, or (class, key, item) of another object, not {given!r}")
        owner, key, item = given
        type_name = _checked_text("a class's type name", getattr(owner, "type_name", owner), _MAX_TYPE_NAME_BYTES)
        need = Need(type_name, check_key(key), _checked_text("an item", item, _MAX_ITEM_BYTES))
        own = (self._host.id.type_name, self._host.id.key)
        return Need("", "", need.item) if need[:2] == own else need


def _state_of(line: LineRow, state: StateRow) -> AdvanceState:
    return "published" if state.sequence <= line.published else _STATES[state.clearance]


def _shown_need(need: Need) -> str | tuple[str, str, str]:
    return need.item if need.is_local else (need.type_name, need.key, need.item)


def _checked_text(what: str, text: Any, most: int) -> str:
    """Raises `InvalidOption` unless it is a text of 1 to `most` UTF-8 bytes without NUL."""
    try:
        size = len(text.encode()) if isinstance(text, str) else 0
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= most or "\0" in text:
        raise InvalidOption(f"the name of {what} is a text of 1 to {most} UTF-8 bytes without NUL, not {text!r:.100}")
    return str(text)
