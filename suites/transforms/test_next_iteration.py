"""Reductions and updates of entries in the next iteration: three graphs that do together what one did."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pytest_fxbucket.checks.promises.iterations import iteration_problems
from pytest_fxbucket.step.portable import digest, encode_module
from pytest_fxbucket.step.roles import StepGraph
from suites.graph.handmade import aten
from suites.graph.whole_steps import Kind, WholeStep
from suites.transforms.moved_steps import bucketed, events, moved, phased, step_of

KINDS: tuple[Kind, ...] = ("fused", "foreach", "plain")
TWO = ["c", "d"]
ENTRY_OF = {f"{layer}.{name}": layer for layer in TWO for name in "wb"}
STATE = {"fused": ["exp_avg", "exp_avg_sq", "step"], "foreach": ["momentum"], "plain": ["momentum"]}


def whole(kind: Kind = "fused", layers: str = "abcd") -> WholeStep:
    return WholeStep(layers, kind)


def problems(before: StepGraph, after: StepGraph) -> list[str]:
    graphs = {phase: phased(after, phase) for phase in after.graphs}
    return iteration_problems(ENTRY_OF, phased(before, "joint"), graphs)


@pytest.mark.parametrize("kind", KINDS)
def test_steady_launches_first_and_waits_and_updates_right_before_the_gather(kind: Kind) -> None:
    forward = events(moved(bucketed(whole(kind)), TWO), "steady")[:18]
    assert forward == [
        *("launch gather a", "launch gather b", "launch reduce d", "launch reduce c", "wait gather a", "forward a"),
        *("wait reduce c", "optimizer c", "launch gather c", "wait gather b", "forward b"),
        *("wait reduce d", "optimizer d", "launch gather d", "wait gather c", "forward c", "wait gather d", "forward d"),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_setup_has_nothing_of_it_and_cleanup_nothing_else(kind: Kind) -> None:
    before, after = bucketed(whole(kind)), moved(bucketed(whole(kind)), TWO)
    gone = {f"{what} reduce {layer}" for what in ("launch", "wait") for layer in TWO} | {"optimizer c", "optimizer d"}
    assert Counter(events(after, "setup")) == Counter(one for one in events(before, "joint") if one not in gone)
    assert set(events(after, "cleanup")) == gone
    assert problems(before, after) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_in_and_out(kind: Kind) -> None:
    before, after = bucketed(whole(kind)), moved(bucketed(whole(kind)), TWO)
    carried = [value.fqn for value in after.outputs["setup"] if value.role == "carried"]
    assert sorted(carried) == ["c.b", "c.w", "d.b", "d.w", "optimizers.0.groups.0.lr"]
    late = [(v.role, v.fqn) for v in before.outputs["joint"] if v.fqn.startswith(("c.", "d."))]
    assert [(value.role, value.fqn) for value in after.outputs["cleanup"]] == late
    assert [v for v in after.outputs["steady"] if v.role != "carried"] == list(before.outputs["joint"])
    assert [v for v in after.outputs["setup"] if v.role != "carried"] == [
        v for v in before.outputs["joint"] if (v.role, v.fqn) not in late
    ]
    own = [f"{fqn}.{key}" for fqn in ENTRY_OF for key in STATE[kind]]
    assert sorted(v.fqn for v in after.inputs["cleanup"] if v.role == "state") == sorted(own)
    assert {v.role for v in after.inputs["cleanup"]} == {"param", "state", "carried"}
    assert after.inputs["setup"] == before.inputs["joint"]


def test_learning_rates_and_gradients_are_carried_and_what_others_may_write_is_copied() -> None:
    after = moved(bucketed(whole()), TWO)
    for phase in ("setup", "steady"):
        results = phased(after, phase).results
        rate = results["carried", "optimizers.0.groups.0.lr"]
        assert rate.target is aten.clone.default
        assert rate.all_input_nodes[0].op == "placeholder"
        assert results["carried", "c.w"].target is aten.mul.Tensor


def test_the_same_step_whatever_its_nodes_are_called_gives_the_same_graphs() -> None:
    other = bucketed(whole())
    for number, node in enumerate(other.graphs["joint"].graph.nodes):
        node.name = f"x{number}_{number % 7}"
    one, two = moved(bucketed(whole()), TWO), moved(other, TWO)
    assert one.inputs == two.inputs
    assert one.outputs == two.outputs
    for phase in one.graphs:
        assert digest(encode_module(one.graphs[phase])) == digest(encode_module(two.graphs[phase]))


def test_an_entry_that_is_read_first_moves_and_is_told() -> None:
    after = moved(bucketed(whole()), ["a", "d"])
    (told,) = after.transformed
    assert told.transformation == "next_iteration"
    assert told.done[0] == "reduces and updates a in the next call, behind 0 nodes of compute there"
    assert [what for what, _ in told.left] == ["reduction of a"]
    assert "behind 0" not in told.done[1]
    assert events(after, "steady")[:4] == ["launch reduce a", "wait reduce a", "optimizer a", "launch gather a"]


def test_several_modules_of_one_entry_move_together() -> None:
    one = moved(bucketed(whole()), [["c", "d"]])
    two = moved(bucketed(whole()), TWO)
    assert digest(encode_module(one.graphs["steady"])) == digest(encode_module(two.graphs["steady"]))
    assert one.transformed[0].done[0].startswith("reduces and updates c+d in the next call")


def test_a_step_that_was_never_bucketed_moves_too() -> None:
    before, after = step_of(whole("plain")), moved(step_of(whole("plain")), TWO)
    assert problems(before, after) == []
    assert events(after, "cleanup")[:2] == ["launch reduce d", "wait reduce d"]


def test_a_step_that_gives_no_gradients_moves_by_what_it_updates() -> None:
    before = bucketed(whole("foreach"))
    kept = [(n, v) for n, v in zip(returned(before), before.outputs["joint"], strict=True) if v.role != "grad"]
    before.graphs["joint"].graph.output_node().args = ([node for node, _ in kept],)
    before.graphs["joint"].graph.eliminate_dead_code()
    after = moved(replace(before, outputs={"joint": tuple(value for _, value in kept)}), TWO)
    carried = [value.fqn for value in after.inputs["cleanup"] if value.role == "carried"]
    assert sorted(carried) == ["c.b", "c.w", "d.b", "d.w", "optimizers.0.groups.0.lr"]
    assert {v.fqn for v in after.outputs["cleanup"] if v.role == "param"} == set(ENTRY_OF)


class Together(WholeStep):
    """One operator makes both gradients of a layer, as that of a norm does."""

    def backward(self, layer: str) -> None:
        for one in reversed(self.of(layer)):
            self.x = self.call(aten.mul.Tensor, self.x, self.gathered(one.shard))
        both = self.call(aten._foreach_mul.Scalar, [self.x, self.x], 2.0)
        for at, one in enumerate(self.of(layer)):
            one.gradient = self.reduced(self.part(both, at))
            self.returns(one.gradient, "grad", one.fqn)


def test_gradients_that_one_operator_makes_are_told_apart() -> None:
    before, after = bucketed(Together("abcd", "fused")), moved(bucketed(Together("abcd", "fused")), TWO)
    assert problems(before, after) == []
    made = {fqn: node for (role, fqn), node in phased(after, "setup").results.items() if role == "carried"}
    assert [made[fqn].args[1] for fqn in ("c.w", "c.b")] == [0, 1]


def returned(step: StepGraph) -> list[Any]:
    found: Any = step.graphs["joint"].graph.output_node().args[0]
    return list(found)


class Scaled(WholeStep):
    """The update of the last layer reads a buffer and the batch."""

    def update(self, group, scale) -> None:
        if group[0].fqn.startswith("d."):
            factor = self.call(aten.add.Tensor, self.call(aten.sum.default, self.x0), self.buffer)
            self.call(aten.neg.default, factor)
            scale = self.call(aten.mul.Tensor, factor, self.buffer)
            gradients = [self.call(aten.mul.Tensor, one.gradient, scale) for one in group]
            for one, gradient in zip(group, gradients, strict=True):
                one.gradient = gradient
        super().update(group, None)

    def batch(self, *shape: int):
        self.buffer = self.given("buffer", "scale")
        self.x0 = super().batch(*shape)
        return self.x0


def test_whatever_else_an_update_reads_is_carried_as_it_was_in_its_own_call() -> None:
    after = moved(bucketed(Scaled("abcd", "plain")), TWO)
    carried = [value.fqn for value in after.inputs["cleanup"] if value.role == "carried"]
    assert sorted(carried) == ["c.b", "c.w", "d.b", "d.w", "optimizers.0.groups.0.lr", "value 1"]
    assert not {value.role for value in after.inputs["cleanup"]} & {"batch", "buffer"}
