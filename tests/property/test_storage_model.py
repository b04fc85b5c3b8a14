"""Random turns of one object against a plain dictionary: what a turn sees, what is kept, what survives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Generator, Iterable
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from actors.durable_object import DurableObject, shared
from actors.errors import CommitFailed, Rejected, WriteSetRejected
from actors.settings import Settings
from tests.support.held_commits import CommitFailure, held_runtime

Step = list[Any]


class _Undo(Exception):
    """Ends a transaction of a random turn by an exception."""


class KeyValues(Protocol):
    """What random steps need: `self.storage`, and the model of it."""

    def get(self, key: str, default: Any = None) -> Any: ...
    def put(self, key: str, value: Any) -> None: ...
    def put_many(self, values: dict[str, Any]) -> None: ...
    def delete(self, key: str) -> bool: ...
    def delete_many(self, keys: Iterable[str]) -> int: ...
    def delete_all(self) -> None: ...
    def list(self, **options: Any) -> dict[str, Any]: ...
    def transaction(self) -> contextlib.AbstractContextManager[Any]: ...


class Model:
    """The same in a dictionary. `rows` is what the turn sees, `kept` what stays when it raises."""

    def __init__(self, rows: dict[str, Any]) -> None:
        self.rows = dict(rows)
        self.kept = dict(rows)

    def get(self, key: str, default: Any = None) -> Any:
        return self.rows.get(key, default)

    def put(self, key: str, value: Any) -> None:
        self.rows[key] = value

    def put_many(self, values: dict[str, Any]) -> None:
        self.rows.update(values)

    def delete(self, key: str) -> bool:
        return self.rows.pop(key, self) is not self

    def delete_many(self, keys: Iterable[str]) -> int:
        return sum(self.delete(key) for key in keys)

    def delete_all(self) -> None:
        self.rows.clear()

    def list(self, **options: Any) -> dict[str, Any]:
        found = {}
        for key in sorted(self.rows, key=str.encode, reverse=options["reverse"]):
            order = key.encode()
            if (
                (options["start"] is None or order >= options["start"].encode())
                and (options["start_after"] is None or order > options["start_after"].encode())
                and (options["end"] is None or order < options["end"].encode())
                and key.startswith(options["prefix"] or "")
                and (options["limit"] is None or len(found) < options["limit"])
            ):
                found[key] = self.rows[key]
        return found

    @contextlib.contextmanager
    def transaction(self) -> Generator[Any, None, None]:
        before = dict(self.rows)
        transaction = _ModelTransaction(self, before)
        try:
            yield transaction
        except BaseException:
            if not transaction.closed:
                self.rows = before
            raise
        transaction.closed = True

    def sync(self) -> None:
        self.kept = dict(self.rows)


class _ModelTransaction:
    def __init__(self, model: Model, before: dict[str, Any]) -> None:
        self.closed = False
        self._model = model
        self._before = before

    def rollback(self) -> None:
        if not self.closed:
            self._model.rows = self._before
            self.closed = True


def apply(target: KeyValues, steps: list[Step], seen: list[Any]) -> None:
    """Take the steps and note what they gave."""
    for name, *arguments in steps:
        if name == "list":
            seen.append(list(target.list(**arguments[0]).items()))
        elif name == "transaction":
            end, inner, after = arguments
            with contextlib.suppress(_Undo), target.transaction() as transaction:
                apply(target, inner, seen)
                if end == "rollback":
                    transaction.rollback()
                    apply(target, after, seen)
                elif end == "raise":
                    raise _Undo
        else:
            seen.append(getattr(target, name)(*arguments))


class Random(DurableObject):
    """Does what it is told, like the model."""

    def do(self, steps: list[Step], end: str) -> list[Any]:
        seen: list[Any] = []
        apply(self.storage, steps, seen)
        _end(end)
        return seen

    async def parts(self, parts: list[list[Step]], end: str) -> list[Any]:
        seen: list[Any] = []
        for steps in parts:
            apply(self.storage, steps, seen)
            await self.storage.sync()
        _end(end)
        return seen

    @shared
    def all(self) -> dict[str, Any]:
        return self.storage.list()


class RandomInterleaved(Random):
    """The same with turns that interleave."""

    turns = "interleaved"


def _end(end: str) -> None:
    if end == "reject":
        raise Rejected("the turn says no")
    if end == "raise":
        raise ValueError("the turn has a bug")


KEYS = ["a", "a\0", "a1", "a2", "ab", "b", "b1", "c", "é", "\ud7ff", "\ue000", "\U0010ffff"]
keys = st.sampled_from(KEYS)
values = st.one_of(st.none(), st.integers(-3, 3), st.text(max_size=3), st.just("x" * 5_000))  # one is never cached
bounds = st.none() | st.sampled_from([*KEYS, "", "a11", "zz"])


@st.composite
def list_options(draw: st.DrawFn) -> dict[str, Any]:
    inclusive = draw(st.booleans())
    return {
        "start": draw(bounds) if inclusive else None,
        "start_after": None if inclusive else draw(bounds),
        "end": draw(bounds),
        "prefix": draw(bounds),
        "reverse": draw(st.booleans()),
        "limit": draw(st.none() | st.integers(1, 5)),
    }


simple_steps = st.one_of(
    st.tuples(st.just("get"), keys),
    st.tuples(st.just("put"), keys, values),
    st.tuples(st.just("put_many"), st.dictionaries(keys, values, max_size=4)),
    st.tuples(st.just("delete"), keys),
    st.tuples(st.just("delete_many"), st.lists(keys, max_size=4)),
    st.tuples(st.just("list"), list_options()),
).map(list)
inner_steps = st.recursive(
    st.lists(simple_steps, max_size=4),
    lambda children: st.lists(
        simple_steps
        | st.tuples(
            st.just("transaction"),
            st.sampled_from(["commit", "rollback", "raise"]),
            children,
            st.lists(simple_steps, max_size=2),
        ).map(list),
        max_size=4,
    ),
    max_leaves=6,
)
turn_steps = st.tuples(inner_steps, st.booleans(), inner_steps).map(
    lambda parts: [*parts[0], *([["delete_all"]] if parts[1] else []), *parts[2]]
)
ends = st.sampled_from(["return", "return", "reject", "raise"])
turns = st.tuples(turn_steps, ends)

#: What a caller gets when nothing of its turn was applied.
NOT_APPLIED = (CommitFailed, WriteSetRejected)


class StorageMachine(RuleBasedStateMachine):
    """One object, its turns, its ends and the ends of its process."""

    kind: type[Random] = Random

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.rows: dict[str, Any] = {}

    @initialize()
    def begin(self) -> None:
        # one write set a commit, so that turns meet rows on their way to disk
        self._context = held_runtime(Settings(durability="off", max_group_rows=1))
        self._run(self._begin())

    async def _begin(self) -> None:
        self.rt, self.commits = await self._context.__aenter__()
        self.stub = self.rt.namespace(self.kind).get("a")
        await self.rt.run_until_idle()

    def teardown(self) -> None:
        self._run(self._context.__aexit__(None, None, None))
        self.loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def _expect(self, parts: list[list[Step]], end: str, synced: bool) -> Any:
        """What the turn should give; the rows are moved on as it should move them."""
        model = Model(self.rows)
        seen: list[Any] = []
        for steps in parts:
            apply(model, steps, seen)
            if synced:
                model.sync()
        # an interleaved turn is not rolled back
        self.rows = model.rows if end == "return" or self.kind.turns == "interleaved" else model.kept
        return {"return": seen, "reject": Rejected, "raise": ValueError}[end]

    @staticmethod
    def _same(result: Any, expected: Any) -> bool:
        return isinstance(result, expected) if isinstance(expected, type) else bool(result == expected)

    # --- what happens ---------------------------------------------------------------------------------

    @rule(batch=st.lists(turns, min_size=1, max_size=4))
    def run_turns_at_once(self, batch: list[tuple[list[Step], str]]) -> None:
        async def run() -> list[Any]:
            calls = [self.stub.do(steps, end) for steps, end in batch]
            return await asyncio.gather(*calls, return_exceptions=True)

        results = self._run(run())
        for (steps, end), result in zip(batch, results, strict=True):
            expected = self._expect([steps], end, synced=False)
            assert self._same(result, expected), (steps, end, result, expected)

    @rule(parts=st.lists(turn_steps, min_size=1, max_size=3), end=ends)
    def run_a_turn_that_syncs(self, parts: list[list[Step]], end: str) -> None:
        async def run() -> Any:
            return (await asyncio.gather(self.stub.parts(parts, end), return_exceptions=True))[0]

        result = self._run(run())
        expected = self._expect(parts, end, synced=True)
        assert self._same(result, expected), (parts, end, result, expected)

    @rule(batch=st.lists(turns, min_size=1, max_size=3), durable=st.integers(0, 3))
    def lose_a_commit(self, batch: list[tuple[list[Step], str]], durable: int) -> None:
        """The disk is full at one of the commits: it and everything that was handed over after it is not applied."""
        if self.kind.turns == "interleaved":
            durable = 0  # such a turn has several commits, so its beginning may stay when its end is lost

        async def run() -> list[Any]:
            self.commits.hold()
            calls = [self.stub.do(steps, end) for steps, end in batch]
            waiting = asyncio.gather(*calls, return_exceptions=True)
            for number in range(durable + 1):
                if not await self.commits.is_held():
                    break
                await (self.commits.release() if number < durable else self.commits.fail(CommitFailure.DISK_FULL))
            self.commits.let_go()
            return await waiting

        results = self._run(run())
        lost = False
        for (steps, end), result in zip(batch, results, strict=True):
            lost = lost or isinstance(result, NOT_APPLIED)
            if lost:
                assert isinstance(result, NOT_APPLIED), result  # nobody is told of what rests on a lost write
                continue
            expected = self._expect([steps], end, synced=False)
            assert self._same(result, expected), (steps, end, result, expected)

    @rule()
    def evict(self) -> None:
        self._run(self.rt.evict(self.stub))

    @rule()
    def crash(self) -> None:
        self._run(self.rt.crash())

    @invariant()
    def the_object_holds_what_the_model_holds(self) -> None:
        async def read() -> Any:
            return await self.stub.all()

        if hasattr(self, "stub"):
            assert list(self._run(read()).items()) == sorted(self.rows.items(), key=lambda row: row[0].encode())


@pytest.mark.parametrize("kind", [Random, RandomInterleaved])
def test_storage_behaves_like_a_dictionary(kind: type[Random]) -> None:
    machine = type(f"{kind.__name__}Machine", (StorageMachine,), {"kind": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
