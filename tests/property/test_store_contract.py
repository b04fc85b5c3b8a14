"""One contract, two stores: whatever is written, read, undone, reopened or fenced, both answer as the model does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from drivers.errors import Fenced, StoreClosed
from drivers.store import Store
from drivers.tables import CLEAR, DIRECTORY, KV, OBJECTS, TABLES, TIMERS, Clear, Key, Op, Values
from tests.support.stores import CLUSTER, PARTITION, PLACES, Place

TEXTS = ["", "a", "a\0", "ab", "b", "\x7f", "é", "\ud7ff", "\ue000", "\U0010ffff"]
CLASSES = ["Cart", "Carton"]
REFS = [b"", b"\0", b"a", b"ab", b"\xff"]
MOMENTS = [0, 1, 999, 1_000, 2**63 - 1]

oids = st.integers(1, 4)
texts = st.sampled_from(TEXTS)
small = st.integers(0, 3)
blobs = st.sampled_from([b"", b"x", b"y" * 40])
moments = st.sampled_from(MOMENTS)

KEYS: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    OBJECTS: (oids,),
    KV: (oids, texts),
    DIRECTORY: (oids, texts),
    TIMERS: (small, moments, small, st.sampled_from(REFS), small),
}
VALUES: dict[str, Callable[[], st.SearchStrategy[Values]]] = {
    KV: lambda: st.tuples(blobs),
    DIRECTORY: lambda: st.tuples(small, moments, small, moments, small, small, small, blobs),
    TIMERS: lambda: st.tuples(moments, small, blobs),
}
#: Objects have one name for life, as in production; the oid says which.
NAMES = {1: (7, "Cart", "a"), 2: (7, "Cart", "ab"), 3: (9, "Cart", "é"), 4: (9, "Carton", "a")}

tables = st.sampled_from(sorted(KEYS))


@st.composite
def keys(draw: st.DrawFn, table: str) -> Key:
    return draw(st.tuples(*KEYS[table]))


@st.composite
def operations(draw: st.DrawFn) -> Op:
    table = draw(tables)
    key = draw(keys(table))
    kind = draw(st.sampled_from(["put", "put", "put", "delete", "clear"]))
    if kind == "delete":
        return (table, key, None)
    if kind == "clear":
        return (table, key[: draw(st.integers(0, len(key)))], CLEAR)
    return (table, key, NAMES[key[0]] if table == OBJECTS else draw(VALUES[table]()))


@st.composite
def scans(draw: st.DrawFn) -> tuple[str, Key, dict[str, Any]]:
    table = draw(tables)
    size = draw(st.integers(0, len(KEYS[table])))
    prefix = draw(keys(table))[:size]
    bounds: dict[str, Any] = {}
    for name in ("start", "start_after", "end"):
        if draw(st.booleans()):
            bounds[name] = draw(keys(table))[size : size + draw(st.integers(0, len(KEYS[table]) - size))]
    return table, prefix, {**bounds, "reverse": draw(st.booleans()), "limit": draw(st.none() | st.integers(0, 4))}


class Model:
    """Rows in plain dictionaries: what is durable, and what the open transaction has on top."""

    def __init__(self) -> None:
        self.durable: dict[str, dict[Key, Values]] = {name: {} for name in TABLES}
        self.open = self._copy()

    def _copy(self) -> dict[str, dict[Key, Values]]:
        return {name: dict(rows) for name, rows in self.durable.items()}

    def write(self, op: Op) -> None:
        table, key, values = op
        rows = self.open[table]
        if isinstance(values, Clear):
            for each in [each for each in rows if each[: len(key)] == key]:
                del rows[each]
        elif values is None:
            rows.pop(key, None)
        else:
            rows[key] = values

    def commit(self) -> None:
        self.durable = self.open
        self.open = self._copy()

    def rollback(self) -> None:
        self.open = self._copy()

    def scan(self, table: str, prefix: Key, **bounds: Any) -> list[Key]:
        size = len(prefix)
        low, above, high = bounds.get("start"), bounds.get("start_after"), bounds.get("end")

        def inside(rest: Key) -> bool:
            return not (
                (low and rest[: len(low)] < low)
                or (above and rest[: len(above)] <= above)
                or (high and rest[: len(high)] >= high)
            )

        found = [key for key in self.durable[table] if key[:size] == prefix and inside(key[size:])]
        found.sort(reverse=bounds["reverse"])
        return [key + self.durable[table][key] for key in found][: bounds["limit"]]


class StoreContract(RuleBasedStateMachine):
    """A store and its model, driven through the same steps."""

    make_place: Callable[[], Place]

    def __init__(self) -> None:
        super().__init__()
        self.place = type(self).make_place()
        self.model = Model()
        self.store: Store = self.place.open()
        self.store.begin()
        self.epoch = 1
        self.commit_seq = 0
        self.numbers = self.durable_numbers = (0, 1)  # last generation given, next id to give
        self.clean = False  # what the next owner will find: an open partition is not
        self.marked = False

    def teardown(self) -> None:
        self.store.close()
        self.place.remove()

    # --- writing --------------------------------------------------------------------------------

    @initialize()
    def it_is_a_new_partition(self) -> None:
        assert (self.store.header.cluster_id, self.store.header.partition_id) == (CLUSTER, PARTITION)
        assert self.store.was_clean

    @rule(ops=st.lists(operations(), max_size=8))
    def write(self, ops: list[Op]) -> None:
        self.store.write(ops)
        for op in ops:
            self.model.write(op)

    @rule(most=st.none() | st.integers(1, 3))
    def flush(self, most: int | None) -> None:
        more = self.store.flush(most)
        assert not (most is None and more)

    @rule(times=small)
    def take_numbers(self, times: int) -> None:
        for _ in range(times):
            generation, next_id = self.numbers
            assert self.store.counters.take_generation() == generation + 1
            assert self.store.counters.take_id() == next_id
            self.numbers = (generation + 1, next_id + 1)

    @rule()
    def commit(self) -> None:
        while self.store.flush(2):
            pass
        self.commit_seq += 1
        assert self.store.commit() == self.commit_seq
        self.store.begin()
        self.model.commit()
        self.durable_numbers = self.numbers
        self.clean = self.marked

    @rule()
    def roll_back(self) -> None:
        self.store.rollback()
        self.store.begin()
        self.model.rollback()

    @rule()
    def mark_clean(self) -> None:
        self.store.mark_clean()
        self.marked = True

    # --- owners ---------------------------------------------------------------------------------

    @rule()
    def reopen(self) -> None:
        self.store.close()
        with pytest.raises(StoreClosed):
            self.store.get(KV, (1, "a"))
        self.store = self.place.open()
        self._taken_over()
        self.store.begin()

    @rule()
    def a_second_owner_fences_the_first(self) -> None:
        first = self.store
        first.rollback()  # lets go of the write lock, as a commit does
        self.store = self.place.open()
        self._taken_over()
        first.begin()
        first.write([(KV, (1, "late"), (b"of the old owner",))])
        first.flush()
        with pytest.raises(Fenced):
            first.commit()
        first.close()
        self.store.begin()

    def _taken_over(self) -> None:
        self.epoch += 1
        self.numbers = self.durable_numbers
        assert self.store.was_clean is self.clean
        self.clean = self.marked = False
        self.model.rollback()

    # --- reading --------------------------------------------------------------------------------

    @rule(place=tables.flatmap(lambda table: st.tuples(st.just(table), keys(table))))
    def get_sees_what_is_durable_and_peek_what_is_open(self, place: tuple[str, Key]) -> None:
        table, key = place
        assert self.store.get(table, key) == self.model.durable[table].get(key)
        assert self.store.peek(table, key) == self.model.open[table].get(key)

    @rule(scan=scans())
    def scan(self, scan: tuple[str, Key, dict[str, Any]]) -> None:
        table, prefix, bounds = scan
        assert self.store.scan(table, prefix, **bounds) == self.model.scan(table, prefix, **bounds)

    @rule()
    def find_object(self) -> None:
        durable = {values[1:]: oid for (oid,), values in self.model.durable[OBJECTS].items()}
        for _, class_name, key in NAMES.values():
            assert self.store.find_object(class_name, key) == durable.get((class_name, key))
        assert self.store.find_object("Nobody", "a") is None

    @rule(
        class_name=st.sampled_from(CLASSES),
        prefix=st.sampled_from(["", "a", "ab", "z"]),
        after=st.sampled_from([None, "", "a", "ab", "é"]),
        limit=st.integers(0, 3),
    )
    def list_objects(self, class_name: str, prefix: str, after: str | None, limit: int) -> None:
        expected = []
        for (oid,), (_, name, key) in self.model.durable[OBJECTS].items():
            if name == class_name and key.startswith(prefix) and key > (after or ""):
                dues = [row[1] for (owner, _), row in self.model.durable[DIRECTORY].items() if owner == oid]
                expected.append((oid, key, min(dues, default=None)))
        expected.sort(key=lambda row: row[1])
        assert self.store.list_objects(class_name, prefix, after, limit) == expected[:limit]

    @rule(lane=small, after=moments)
    def what_is_due_next(self, lane: int, after: int) -> None:
        rows = [(key[0], key[1]) for key in self.model.durable[TIMERS]]
        assert self.store.lanes() == sorted({lane for lane, _ in rows})
        assert self.store.next_due_ms() == min((due for _, due in rows), default=None)
        of_lane = [due for owner, due in rows if owner == lane]
        assert self.store.next_due_ms(lane) == min(of_lane, default=None)
        assert self.store.next_due_ms(lane, after) == min((due for due in of_lane if due > after), default=None)

    # --- what always holds ----------------------------------------------------------------------

    @invariant()
    def the_header_is_right(self) -> None:
        assert self.store.header.epoch == self.epoch
        assert self.store.commit_seq == self.commit_seq


@pytest.mark.parametrize("kind", sorted(PLACES))
def test_the_store_does_what_the_model_does(kind: str) -> None:
    class Contract(StoreContract):
        make_place = staticmethod(PLACES[kind])

    run_state_machine_as_test(
        Contract,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


@pytest.fixture(params=sorted(PLACES))
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    place = PLACES[request.param]()
    store = place.open()
    store.begin()
    yield store
    store.close()
    place.remove()


def test_an_object_deleted_and_made_again_in_one_commit_has_its_new_number(store: Store) -> None:
    store.write([(OBJECTS, (1,), (7, "Cart", "a"))])
    store.flush()
    store.commit()
    store.begin()
    store.write([(OBJECTS, (1,), None), (OBJECTS, (2,), (7, "Cart", "a"))])
    store.flush()
    store.commit()
    assert store.find_object("Cart", "a") == 2
    assert [oid for oid, *_ in store.list_objects("Cart", "", None, 10)] == [2]


def test_a_clear_spares_what_is_written_after_it(store: Store) -> None:
    store.write([(KV, (1, "old"), (b"1",)), (KV, (2, "other"), (b"2",))])
    store.flush(1)
    store.write([(KV, (1, "mid"), (b"3",)), (KV, (1,), CLEAR), (KV, (1, "new"), (b"4",))])
    assert store.peek(KV, (1, "old")) is None
    while store.flush(1):
        pass
    store.commit()
    assert store.scan(KV) == [(1, "new", b"4"), (2, "other", b"2")]
