"""What the pass makes of launches of every kind is green in the audit, and red once a member stands elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.checks.promises.kept import audit
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.buckets import GraphAnalysis
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.targets import by_parameter
from suites.checks.launches_by_hand import BF16
from suites.checks.promising import changed, promise_by
from suites.graph.handmade import GROUP, RANKS, Handmade, aten, c10d

OTHER = "1"
ENTRY_OF = {fqn: fqn[0] for fqn in ("a.w", "a.b", "b.w", "b.b")}
Make = Callable[[Handmade], None]


class Case:
    """A graph before the pass, the same after it, and what the audit says."""

    def __init__(self, make: Make, dtypes: str = "separate", **rules: Any) -> None:
        self.made = Handmade()
        make(self.made)
        self.before = self.made.read()
        self.graph = copy.deepcopy(self.made.graph)
        targets = by_parameter(self.graph, self.before, self.made.inputs, ENTRY_OF, ("a", "b"))
        self.report = ManualPass.of(dtypes=dtypes, **rules).run(self.graph, targets)
        own_dtype = {value.fqn: value.dtype for value in self.made.inputs if value.role == "param"}
        self.promise = promise_by(ENTRY_OF, own_dtype, dtypes=dtypes)

    def after(self) -> GraphAnalysis:
        return read_graph(self.graph, self.made.inputs, self.made.outputs)

    def problems(self, **change: Any) -> list[str]:
        return audit(changed(self.promise, **change), self.before, self.after())

    def calls(self, target: object) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.target is target]


def gradient(made: Handmade, *shape: int) -> fx.Node:
    return made.compute(made.batch(*shape))


def each(make: Callable[[Handmade, str, fx.Node], None]) -> Make:
    """``make`` of each parameter with a gradient, the last entry's first."""

    def all_of(made: Handmade) -> None:
        made.loss(made.batch(2))
        for fqn, shape in (("b.w", (4, 2)), ("b.b", (6,)), ("a.w", (4, 2)), ("a.b", (8,))):
            make(made, fqn, gradient(made, *shape))

    return all_of


def gathers(dtypes: dict[str, torch.dtype], chain: bool = False) -> Make:
    def all_of(made: Handmade) -> None:
        whole = []
        for shard in [made.param(fqn, 3, dtype=dtypes.get(fqn, torch.float32)) for fqn in ENTRY_OF]:
            full = made.gathered(shard)
            whole.append(made.wait(made.gather(full, 3, OTHER)) if chain else full)
        made.loss(*whole)

    return all_of


def coalesced(made: Handmade) -> None:
    made.loss(made.batch(2))
    for entry in "ba":
        nodes = [gradient(made, 4, 2), gradient(made, 6)]
        launch = made.call(c10d.reduce_scatter_tensor_coalesced.default, nodes, "avg", RANKS, GROUP)
        for i, fqn in enumerate((f"{entry}.w", f"{entry}.b")):
            made.returns(made.wait(made.part(launch, i)), fqn=fqn)


def twice(made: Handmade, fqn: str, value: fx.Node) -> None:
    again = made.call(aten.mul.Tensor, value, 2)
    made.returns(made.call(aten.add.Tensor, made.reduced(value), made.reduced(again)), fqn=fqn)


CASES: dict[str, tuple[Make, list[tuple[str, tuple[str, ...]]]]] = {
    "summed": (
        each(lambda made, fqn, value: made.returns(made.summed(value), fqn=fqn)),
        [("all_reduce", ("b.w", "b.b")), ("all_reduce", ("a.w", "a.b"))],
    ),
    "scattered, then summed": (
        each(lambda made, fqn, value: made.returns(made.summed(made.reduced(value), OTHER), fqn=fqn)),
        [(kind, (f"{entry}.w", f"{entry}.b")) for entry in "ba" for kind in ("reduce_scatter", "all_reduce")],
    ),
    "summed, then scattered": (
        each(lambda made, fqn, value: made.returns(made.reduced(made.summed(value, OTHER)), fqn=fqn)),
        [(kind, (f"{entry}.w", f"{entry}.b")) for entry in "ba" for kind in ("all_reduce", "reduce_scatter")],
    ),
    "coalesced": (coalesced, [("reduce_scatter", (f"{entry}.w", f"{entry}.b")) for entry in "ba"]),
    "a layer used twice": (
        each(twice),
        [("reduce_scatter", (f"{entry}.w",) * 2 + (f"{entry}.b",) * 2) for entry in "ba"],
    ),
    "gathers of gathers": (
        gathers({}, chain=True),
        [("all_gather", (f"{entry}.w", f"{entry}.b")) for entry in "aabb"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_launch_is_bucketed_and_green(name: str) -> None:
    make, launches = CASES[name]
    case = Case(make)
    assert sorted((b.kind, b.fqns) for b in case.after().buckets) == sorted(launches)
    assert case.problems() == []


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_launch_that_is_left_as_it_was_is_red(name: str) -> None:
    make, _ = CASES[name]
    case = Case(make, enabled=False)
    found = case.problems()
    if name == "coalesced":
        assert found == [], "one launch for each entry from the start"
    else:
        assert any("launches, expected 1" in problem for problem in found), found


@pytest.mark.parametrize("name", [name for name in CASES if name != "coalesced"])
def test_an_operator_that_our_pass_does_not_know_is_expected_to_be_merged_all_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "MERGED", {})
    assert any("launches, expected 1" in problem for problem in Case(CASES[name][0]).problems())


def mixed(**rules: Any) -> Case:
    """a.w and a.b of 3 elements each in float32 and bfloat16, b.w and b.b the other way round."""
    return Case(gathers({"a.b": BF16, "b.w": BF16}), dtypes="mixed", **rules)


def test_members_of_a_mixed_bucket_that_are_swapped_on_their_way_are_told() -> None:
    case = mixed()
    pack = case.calls(aten.cat.default)[1]
    narrow, wide = pack.args[0]
    pack.args = ([wide, narrow],)
    found = case.problems()
    assert any("reads gathered bytes that are no parameter in its order: b.b" in problem for problem in found), found


def test_several_dtypes_in_one_launch_are_green_and_members_of_two_are_not_asked_for_otherwise() -> None:
    case = mixed()
    assert case.problems() == []
    assert [(b.dtype, b.fqns) for b in case.after().buckets] == [
        (torch.uint8, ("a.w", "a.b")),
        (torch.uint8, ("b.w", "b.b")),
    ]
    assert any("its launch also carries a.b" in problem for problem in case.problems(dtypes="separate"))
    apart = Case(gathers({"a.b": BF16, "b.w": BF16}))
    assert apart.problems() == []
    assert any("entry a, forward all_gather: 2 launches, expected 1" in problem for problem in apart.problems(dtypes="mixed"))


def test_members_of_a_mixed_bucket_that_are_not_aligned_are_told() -> None:
    case = mixed()
    pack, split = case.calls(aten.cat.default)[1], case.calls(aten.split_with_sizes.default)[1]
    padded, wide = pack.args[0]
    (narrow,) = padded.all_input_nodes
    pack.args = ([narrow, padded],)
    padded.replace_input_with(narrow, wide)
    pack.prepend(padded)
    split.args = (split.args[0], [6, 12, 2], 1)
    (piece,) = (user for user in split.users if user.args[1] == 2)
    piece.args = (split, 1)
    assert any("b.b begins at byte 6 of a rank's part, expected 8" in problem for problem in case.problems())


def test_bytes_of_a_mixed_bucket_that_align_nothing_are_told() -> None:
    case = mixed()
    first, *rest = case.after().buckets
    longer = replace(case.after(), buckets=(replace(first, bytes=first.bytes + 16), *rest))
    assert audit(case.promise, case.before, longer) == ["forward all_gather of a.w, a.b moves 56 bytes, its members have 36"]


def test_a_member_of_a_mixed_bucket_that_is_read_as_another_dtype_is_told() -> None:
    case = mixed()
    view = next(node for node in case.calls(aten.view.dtype) if node.args[1] == BF16)
    view.args = (view.args[0], torch.float16)
    assert case.problems() == ["compute reads the bits of a.b, bfloat16 as float16, which it did not before the pass"]


def test_a_member_that_needs_another_one_is_launched_behind_it_and_no_third_time() -> None:
    def chained(made: Handmade, parted: bool) -> None:
        made.loss(made.batch(2))
        first = made.reduced(gradient(made, 4, 2))
        made.returns(first, fqn="a.w")
        value = made.call(aten.add.Tensor, gradient(made, 2, 2), first)
        made.returns(made.reduced(value), fqn="a.b")
        made.returns(made.reduced(gradient(made, 4)), fqn="b.w")

    case = Case(lambda made: chained(made, False))
    assert [b.fqns for b in case.after().buckets] == [("a.w",), ("a.b",), ("b.w",)]
    assert case.problems() == []
    one = {fqn: "a" for fqn in ENTRY_OF}
    found = case.problems(entry_of=one, entries=("a",))
    assert "entry a, backward reduce_scatter, part 1 of 2: 2 launches, expected 1" in found, found
