"""Write sets are data: they survive being encoded, and applying one twice gives the rows of applying it once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivers.store import Store
from drivers.tables import CLEAR, KV, TABLES, Op
from drivers.write_set import FieldEquals, InboxEntry, Lineage, WriteSet
from tests.property.test_store_contract import operations
from tests.support.stores import PLACES

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
guards = st.builds(
    FieldEquals,
    table=st.sampled_from(sorted(TABLES)),
    key=st.tuples(st.integers(-(2**63), 2**63 - 1), texts),
    column=st.integers(0, 3),
    value=st.none() | st.integers(-(2**63), 2**63 - 1) | texts | st.binary(max_size=4) | st.floats(allow_nan=False),
)
entries = st.builds(
    InboxEntry,
    call_id=st.binary(max_size=20),
    class_name=texts,
    key=texts,
    fingerprint=st.binary(max_size=8),
    status=st.integers(0, 4),
    reply=st.binary(max_size=20),
    caller=st.none() | st.tuples(texts, texts, st.binary(max_size=4)),
)


@given(
    ops=st.lists(operations(), max_size=10),
    guards=st.none() | st.lists(guards, min_size=1, max_size=3),
    name=st.none() | texts.filter(bool),
    position=st.integers(0, 2**40),
    inbox=st.none() | entries,
)
def test_a_write_set_survives_being_encoded(
    ops: list[Op],
    guards: list[FieldEquals] | None,
    name: str | None,
    position: int,
    inbox: InboxEntry | None,
) -> None:
    lineage = None if name is None else Lineage(name)
    before = WriteSet(ops, guards=guards, lineage=lineage, position=position, inbox=inbox)
    after = WriteSet.from_bytes(before.to_bytes())
    assert (after.ops, after.guards, after.position, after.inbox) == (ops, guards, position, inbox)
    assert (None if after.lineage is None else after.lineage.name) == name
    assert after.to_bytes() == before.to_bytes()


def test_a_clear_is_still_the_clear_after_the_way_through_bytes() -> None:
    after = WriteSet.from_bytes(WriteSet([(KV, (1,), CLEAR), (KV, (1, "k"), None)]).to_bytes())
    assert after.ops[0][2] is CLEAR
    assert after.ops[1][2] is None


def rows(store: Store) -> dict[str, list[tuple[object, ...]]]:
    return {table: store.scan(table) for table in TABLES}


def apply(store: Store, ops: list[Op]) -> dict[str, list[tuple[object, ...]]]:
    store.begin()
    store.write(ops)
    store.flush()
    store.commit()
    return rows(store)


@pytest.mark.parametrize("kind", sorted(PLACES))
@settings(max_examples=25, deadline=None)
@given(before=st.lists(operations(), max_size=6), ops=st.lists(operations(), max_size=10))
def test_applying_a_write_set_twice_gives_the_rows_of_once(kind: str, before: list[Op], ops: list[Op]) -> None:
    place = PLACES[kind]()
    store = place.open()
    try:
        apply(store, before)
        once = apply(store, ops)
        assert apply(store, WriteSet.from_bytes(WriteSet(ops).to_bytes()).ops) == once
    finally:
        store.close()
        place.remove()
