"""Promises of a plan, kept and broken, on readings made by hand: two layers and a head, forward and backward.

`test_broken_passes.py` has real graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pytest_fxbucket.checks.promises.expectations import Expectations
from pytest_fxbucket.checks.promises.kept import audit
from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis, Member
from pytest_fxbucket.step.roles import Direction
from suites.checks.launches_by_hand import BF16, F32
from suites.checks.promising import changed, promise_by

C64 = torch.complex64
ENTRIES = {"a": ("a.w", "a.b"), "b": ("b.w", "b.b"), "c": ("c.w",)}
ENTRY_OF = {fqn: entry for entry, fqns in ENTRIES.items() for fqn in fqns}
ORDER = (("forward", "abc"), ("backward", "cba"))

PROMISE = promise_by(ENTRY_OF, entries=())
Script = list[tuple[str, str]]


def script(prefetch: int = 1, defer: bool = True, reshard: bool = True) -> Script:
    """Events of a good schedule: (what, "direction kind entry") for launch and wait, (use, "direction entry") for compute."""
    events: Script = []
    held: list[str] = []
    for direction, entries in ORDER:
        gathers = [f"{direction} all_gather {entry}" for entry in entries] if direction == "forward" or reshard else []
        launched = 0
        for index, entry in enumerate(entries):
            while gathers and launched <= min(index + prefetch, len(gathers) - 1):
                events.append(("launch", gathers[launched]))
                launched += 1
            if gathers:
                events.append(("wait", gathers[index]))
            events.append(("use", f"{direction} {entry}"))
            if direction == "backward":
                reduction = f"backward reduce_scatter {entry}"
                events.append(("launch", reduction))
                held.append(reduction)
                events += [("wait", held.pop(0))] if len(held) > defer else []
    return events + [("wait", reduction) for reduction in held]


def reading(events: Script, members: dict[str, Sequence[str]] | None = None, dtype: torch.dtype = F32) -> GraphAnalysis:
    """The graph that runs ``events``; ``members`` by launch (left out: those of its entry), each of 4 elements on 4 ranks."""
    places: dict[tuple[str, str], int] = {event: 10 * i for i, event in enumerate(events)}
    uses = {name: place for (what, name), place in places.items() if what == "use"}
    last = 10 * len(events)
    buckets = []
    for what, name in events:
        if what != "launch":
            continue
        direction, kind, entry = name.split()
        fqns = (members or {}).get(name, ENTRIES.get(entry, (entry,)))
        first = uses.get(f"{direction} {entry}") if kind == "all_gather" else last
        size = 4 * dtype.itemsize
        bucket = Bucket(
            kind=kind,
            op="" if kind == "all_gather" else "avg",
            group="0",
            dtype=dtype,
            numel=16 * len(fqns),
            bytes=4 * size * len(fqns),
            parts=4,
            members=tuple(Member(fqn, size * i, 4, 23, dtype, first) for i, fqn in enumerate(fqns)),
            direction="forward" if direction == "forward" else "backward",
            launch=places[what, name],
            wait=places.get(("wait", name)),
            first_use=first,
            backward_use=first if direction == "backward" else None,
            node=name,
        )
        buckets.append(bucket)
    computes: list[tuple[int, Direction, str]] = []
    for name, place in uses.items():
        direction, entry = name.split()
        computes += [(place + i, "forward" if direction == "forward" else "backward", f) for i, f in enumerate(ENTRIES[entry])]
    return GraphAnalysis(tuple(buckets), tuple(computes), (), last)


def captured(reshard: bool = True, dtype: torch.dtype = F32) -> GraphAnalysis:
    """The graph before the pass: every parameter on its own, launched where it is read."""
    events = script(0, False, reshard)
    whole = reading(events, dtype=dtype)
    alone = []
    for bucket in whole.buckets:
        for i, member in enumerate(bucket.members):
            size = 16 * dtype.itemsize
            one = replace(bucket, members=(replace(member, offset=0),), numel=16, bytes=size, node=f"{bucket.node} {i}")
            alone.append(one)
    return replace(whole, buckets=tuple(alone))


def moved(events: Script, what: str, name: str, to: int) -> Script:
    """``events`` with one of them taken out and put before what is number ``to`` then."""
    rest = [event for event in events if event != (what, name)]
    assert len(rest) == len(events) - 1
    return [*rest[:to], (what, name), *rest[to:]]


def change_bucket(of: GraphAnalysis, node: str, **change: Any) -> GraphAnalysis:
    assert any(bucket.node == node for bucket in of.buckets)
    return replace(of, buckets=tuple(replace(b, **change) if b.node == node else b for b in of.buckets))


class TestSchedule:
    @pytest.mark.parametrize("reshard", [True, False])
    @pytest.mark.parametrize("defer", [True, False])
    @pytest.mark.parametrize("prefetch", [0, 1, 2])
    def test_what_is_promised_is_green_and_nothing_else_is(self, prefetch: int, defer: bool, reshard: bool) -> None:
        promise = changed(PROMISE, prefetch=prefetch, defer_reduce=defer, reshard_after_forward=reshard)
        have = reading(script(prefetch, defer, reshard))
        assert audit(promise, captured(reshard), have) == []
        for other in {0, 1, 2} - {prefetch}:
            found = audit(changed(promise, prefetch=other), captured(reshard), have)
            words = f"prefetch = {other} is not reached" if other > prefetch else f"earlier than prefetch = {other}"
            schedule = [line for line in found if "gathered bytes alive" not in line]
            assert schedule
            assert all("all_gather" in line and words in line for line in schedule)
            assert other < prefetch or schedule == found, "what is gathered too late takes no memory"
        other_defer = audit(changed(promise, defer_reduce=not defer), captured(reshard), have)
        words = "but defer_reduce = false" if defer else "it is not deferred"
        assert [line.split(",")[0] for line in other_defer] == ["entry c", "entry b"]
        assert all(words in line for line in other_defer)

    def test_a_launch_that_was_as_early_before_the_pass_is_not_the_pass_s(self) -> None:
        events = script(prefetch=2)
        early = [replace(b, node=f"{b.node} {i}") for i, b in enumerate(reading(events).buckets)]
        assert audit(changed(PROMISE, prefetch=1), replace(reading(events), buckets=tuple(early)), reading(events)) == []
        assert audit(changed(PROMISE, prefetch=1), captured(), reading(events)) != []

    def test_a_launch_that_needs_what_another_wait_brings_cannot_stand_before_that_wait(self) -> None:
        late = moved(script(), "launch", "forward all_gather c", script().index(("wait", "forward all_gather b")))
        have = reading(late)
        wait = next(b.wait for b in have.buckets if b.node == "forward all_gather b")
        assert wait is not None
        before = change_bucket(captured(), "forward all_gather c 0", blocked=wait)
        assert audit(PROMISE, before, change_bucket(have, "forward all_gather c", blocked=wait)) == []
        assert audit(PROMISE, before, change_bucket(have, "forward all_gather c", blocked=wait - 1)) != []
        assert audit(PROMISE, captured(), change_bucket(have, "forward all_gather c", blocked=wait)) != [], (
            "not before the pass"
        )

    def test_a_reduction_whose_result_a_launch_needs_is_waited_for_before_that(self) -> None:
        events = script()
        early = moved(events, "wait", "backward reduce_scatter c", events.index(("launch", "backward reduce_scatter c")) + 1)
        have = reading(early)
        wait = next(b.wait for b in have.buckets if b.node == "backward reduce_scatter c")
        assert wait is not None
        before = change_bucket(captured(), "backward reduce_scatter c 0", needed=wait + 1)
        bound = change_bucket(have, "backward reduce_scatter c", needed=wait + 1)
        assert audit(PROMISE, before, bound) == []
        late = change_bucket(have, "backward reduce_scatter c", needed=have.last)
        for earlier, now in ((before, late), (captured(), bound)):
            assert any("it is not deferred" in line for line in audit(PROMISE, earlier, now))

    @pytest.mark.parametrize("prefetch", [1, 2])
    def test_a_gather_that_is_waited_for_before_what_should_hide_it_is_exposed(self, prefetch: int) -> None:
        events = script(prefetch)
        at = events.index(("use", "backward b"))
        early = moved(events, "wait", "backward all_gather a", at)
        found = audit(changed(PROMISE, prefetch=prefetch), captured(), reading(early))
        assert "entry a, backward all_gather is waited for before b computes, which used to hide it: it is exposed" in found

    def test_a_gather_of_backward_that_is_launched_in_forward_is_said(self) -> None:
        early = moved(script(), "launch", "backward all_gather c", 1)
        assert "entry c, backward all_gather is launched in forward, before the compute of a, b, c" in audit(
            PROMISE, captured(), reading(early)
        )

    @pytest.mark.parametrize("defer", [True, False])
    def test_entries_whose_reductions_interleave_count_by_their_last_launch(self, defer: bool) -> None:
        """Not merged: ``a`` reduces first and last, ``b`` between."""
        promise = changed(PROMISE, enabled=False, prefetch=0, defer_reduce=defer)
        names = ("a.b", "b.w", "a.w")
        before, buckets = captured(), []
        for i, fqn in enumerate(names):
            one = next(b for b in before.buckets if b.kind == "reduce_scatter" and b.fqns == (fqn,))
            wait = before.last - 10 + i if defer else 10 * i + 5
            buckets.append(replace(one, launch=10 * i, wait=wait))
        have = replace(before, buckets=tuple(buckets), computes=())
        found = audit(promise, have, have)
        assert found == []
        at_once = replace(have, buckets=(buckets[0], replace(buckets[1], wait=11), buckets[2]))
        assert bool(audit(promise, have, at_once)) == defer


class TestEntries:
    def broken(self, members: dict[str, Sequence[str]], promise: Expectations = PROMISE) -> list[str]:
        return audit(promise, captured(), reading(script(), members))

    def test_a_member_that_no_launch_has_is_named(self) -> None:
        found = self.broken({"forward all_gather a": ["a.w"]})
        assert "entry a, forward all_gather: a.b is not gathered in forward" in found

    def test_a_gradient_that_is_not_reduced_is_named(self) -> None:
        found = self.broken({"backward reduce_scatter b": ["b.w"]})
        assert "entry b, backward reduce_scatter: b.b is not reduced in backward" in found

    def test_a_member_of_another_entry_is_named_with_its_owner(self) -> None:
        found = self.broken({"forward all_gather a": ["a.w", "a.b", "c.w"]})
        assert "entry a, forward all_gather: its launch also carries c.w of c" in found
        assert "entry c, forward all_gather: c.w is gathered more than once in forward" in found

    def test_something_that_is_no_parameter_is_said(self) -> None:
        found = self.broken({"forward all_gather a": ["a.w", "a.b", ""]})
        assert "entry a, forward all_gather: its launch also carries something that is no parameter" in found

    def test_a_member_twice_in_its_launch_is_said(self) -> None:
        found = self.broken({"forward all_gather a": ["a.w", "a.b", "a.w"]})
        assert "entry a, forward all_gather: its launch carries a.w twice" in found

    def test_a_layout_of_execution_follows_the_launches_and_no_other(self) -> None:
        swapped = [captured().buckets[i] for i in (1, 0)]
        before = replace(captured(), buckets=(*swapped, *captured().buckets[2:]))
        promise = changed(PROMISE, layout="execution")
        turned = reading(script(), {"forward all_gather a": ["a.b", "a.w"]})
        assert audit(promise, before, turned) == []
        assert audit(promise, before, reading(script())) == [
            "entry a, forward all_gather: member 0 of the layout is a.w, expected a.b (execution order)"
        ]

    def test_a_gap_between_members_says_where(self) -> None:
        gap = (Member("a.w", 0, 4, 23, F32), Member("a.b", 24, 4, 23, F32))
        broken = change_bucket(reading(script()), "forward all_gather a", members=gap)
        assert audit(PROMISE, captured(), broken) == [
            "entry a, forward all_gather: a.b begins at byte 24 of a rank's part, expected 16"
        ]

    def test_a_launch_that_the_graph_before_did_not_have_is_said(self) -> None:
        extra = replace(reading(script()).buckets[0], kind="all_reduce", op="sum", members=(), node="extra")
        have = reading(script())
        found = audit(PROMISE, captured(), replace(have, buckets=(*have.buckets, extra)))
        assert found == ["all_reduce sum of 32 elements in float32 of no parameter is launched once, never before the pass"]
        before = captured()
        assert audit(PROMISE, replace(before, buckets=(*before.buckets, extra)), have) == [
            "all_reduce sum of 32 elements in float32 of no parameter is launched never, once before the pass"
        ]

    @pytest.mark.parametrize(
        "change", [{"module": "layers.0.attention"}, {"module": ""}, {"module": "", "direction": "optimizer"}]
    )
    def test_a_fault_of_a_launch_of_no_parameter_says_whose_activations_it_carries(self, change: dict[str, str]) -> None:
        like = reading(script()).buckets[0]
        members = (Member("", 0, 32, 23, F32),)
        was = replace(like, kind="all_reduce", op="sum", members=members, group="tp", node="sum", **change)
        before, after = (
            replace(one, buckets=(*one.buckets, replace(was, group=group)))
            for one, group in ((captured(), "tp"), (reading(script()), "dp"))
        )
        what = "norms" if "direction" in change else "activations" + " of layers.0.attention" * bool(change["module"])
        words = f"{was.direction} all_reduce of {what} runs on another process group than before the pass"
        assert audit(PROMISE, before, after) == [words]

    def test_what_cannot_be_followed_is_a_fault_and_never_a_pass(self) -> None:
        problem = "aten.mm.default (mm) reads gathered bytes that are no parameter in its order: a.w, a.b"
        have = replace(reading(script()), problems=(problem,))
        assert audit(PROMISE, captured(), have) == [f"the graph cannot be followed: {problem}"]
        assert audit(PROMISE, replace(captured(), problems=(problem,)), have) == [
            f"the graph before the pass cannot be read: {problem}"
        ]

    def test_compute_that_reads_another_member_or_one_more_is_named(self) -> None:
        have = reading(script())
        first, second, *rest = have.computes
        swapped = replace(have, computes=((first[0], first[1], second[2]), (second[0], second[1], first[2]), *rest))
        (problem,) = audit(PROMISE, captured(), swapped)
        assert problem.startswith("forward compute uses a.b where it used a.w before the pass")
        more = replace(have, computes=(*have.computes, (have.last - 1, "backward", "c.w")))
        assert audit(PROMISE, captured(), more) == ["backward compute uses c.w 2 times, once before the pass"]


class TestOrderOfCompute:
    def moved(self, names: str) -> list[str]:
        before = replace(captured(), names=tuple("abcdefghijklmnop"))
        return audit(PROMISE, before, replace(reading(script()), names=tuple(names)))

    def test_compute_that_changes_its_order_without_need_is_counted(self) -> None:
        assert self.moved("abcdefghijklmnop") == []
        assert self.moved("ponmlkjihgfedcba") == [
            "15 of 16 compute nodes stand in another order than before the pass; at most 5% may"
        ]

    def test_a_few_nodes_of_a_small_graph_and_nodes_of_other_names_are_not(self) -> None:
        assert self.moved("ebcdafghijklmnop") == []
        assert self.moved("ponmlkj") == []

    def test_bits_that_are_read_as_another_dtype_are_told_unless_they_were_before(self) -> None:
        read = replace(reading(script()), seen_as=(("a.w", "bfloat16 as float16"),))
        assert audit(PROMISE, captured(), read) == [
            "compute reads the bits of a.w, bfloat16 as float16, which it did not before the pass"
        ]
        assert audit(PROMISE, replace(captured(), seen_as=read.seen_as), read) == []


WITHOUT_B = {fqn: entry for fqn, entry in ENTRY_OF.items() if entry != "b"}


class TestUnplanned:
    def apart(self) -> GraphAnalysis:
        """Of b, which no entry names, each parameter has its own launch, as before the pass."""
        whole = reading(script())
        alone = [bucket for bucket in captured().buckets if bucket.fqns[0].startswith("b")]
        return replace(whole, buckets=(*(b for b in whole.buckets if not b.node.endswith("b")), *alone))

    def test_allowed_ones_are_to_be_left_alone(self) -> None:
        promise = changed(PROMISE, entry_of=WITHOUT_B, prefetch=0, defer_reduce=False)
        faults = [line for line in audit(promise, captured(), self.apart()) if "prefetch" not in line and "defer" not in line]
        assert faults == []
        found = audit(promise, captured(), reading(script()))
        assert "entry b.w, forward all_gather: its launch also carries b.b of no entry" in found

    def test_root_puts_them_in_one_launch(self) -> None:
        promise = changed(PROMISE, entry_of={**WITHOUT_B, "b.w": "root", "b.b": "root"})
        assert audit(promise, captured(), reading(script())) == []
        assert "entry root, forward all_gather: 2 launches, expected 1" in audit(promise, captured(), self.apart())


class TestSwitches:
    def test_without_bucketing_every_parameter_keeps_its_launch(self) -> None:
        promise = changed(PROMISE, enabled=False, prefetch=0, defer_reduce=False)
        assert audit(promise, captured(), captured()) == []
        found = audit(promise, captured(), reading(script(0, False)))
        assert "entry a, forward all_gather (a.w): its launch also carries a.b of a" in found

    def test_backward_that_gathers_what_should_have_been_kept(self) -> None:
        promise = changed(PROMISE, reshard_after_forward=False)
        found = audit(promise, captured(), reading(script()))
        assert found == ["reshard_after_forward = false, but backward gathers c.w, b.w, b.b and 2 more again"]


class TestNumbers:
    @pytest.mark.parametrize("key", ["param_dtype", "reduce_dtype"])
    def test_a_dtype_that_is_not_the_one_asked_for(self, key: str) -> None:
        asked: dict[str, Any] = {key: BF16}
        found = audit(changed(PROMISE, **asked), captured(), reading(script()))
        kind = "all_gather" if key == "param_dtype" else "reduce_scatter"
        assert f"backward {kind} of a.w, a.b is launched in float32, expected bfloat16" in found
        assert all(kind in line for line in found)

    def test_left_out_means_the_own_dtype(self) -> None:
        members = (Member("c.w", 0, 4, 7, BF16),)
        narrow = change_bucket(reading(script()), "forward all_gather c", members=members, dtype=BF16, bytes=32)
        found = audit(PROMISE, captured(), narrow)
        assert found == ["forward all_gather of c.w is launched in bfloat16, expected float32"]

    @pytest.mark.parametrize(("dtype", "bits", "said"), [(F32, 10, "float16"), (C64, 10, "complex32"), (F32, 0, "0 bits")])
    def test_a_detour_is_named_by_a_dtype_of_its_own_kind(self, dtype: torch.dtype, bits: int, said: str) -> None:
        promise = changed(PROMISE, own_dtype=dict.fromkeys(ENTRY_OF, dtype))
        members = (Member("c.w", 0, 4, bits, dtype, None),)
        narrow = change_bucket(reading(script(), dtype=dtype), "forward all_gather c", members=members)
        name = str(dtype).removeprefix("torch.")
        assert audit(promise, captured(dtype=dtype), narrow) == [
            f"forward all_gather of c.w is squeezed through {said} on its way, expected {name}"
        ]

    def test_what_asked_for_bfloat16_and_has_it_is_green(self) -> None:
        promise = changed(PROMISE, param_dtype=BF16, reduce_dtype=BF16)
        assert audit(promise, captured(dtype=BF16), reading(script(), dtype=BF16)) == []

    def test_another_reduction_or_group_is_named(self) -> None:
        node = "backward reduce_scatter a"
        assert audit(PROMISE, captured(), change_bucket(reading(script()), node, op="sum")) == [
            "backward reduce_scatter of a.w, a.b reduces by sum, expected avg"
        ]
        assert audit(PROMISE, captured(), change_bucket(reading(script()), node, group="1")) == [
            "backward reduce_scatter of a.w, a.b runs on another process group than before the pass"
        ]
