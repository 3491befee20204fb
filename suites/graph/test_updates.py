"""The optimizer's part of a step is told from its backward, also where it reduces a norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx

from pytest_fxbucket.checks.promises.updates import update_problems
from pytest_fxbucket.golden.schedule import schedule_of
from pytest_fxbucket.golden.text import schedule_lines
from pytest_fxbucket.graph.buckets import GraphAnalysis
from suites.checks.promising import promise_by
from suites.graph.handmade import Handmade
from suites.graph.whole_steps import Kind, WholeStep

aten = torch.ops.aten
NAMES = ("a.w", "b.w")
PROMISE = promise_by(dict(zip(NAMES, "ab", strict=True)), {}, entries=())


def step(*, in_place: bool, clips: bool, returns_gradients: bool = True) -> GraphAnalysis:
    """A gathered parameter, its loss, its reduced gradient, and an update of the shard."""
    made = Handmade()
    shard, x = made.param("a.w", 4), made.batch(8)
    full = made.gathered(shard)
    made.loss(full)
    gradient = made.reduced(made.call(aten.mul.Tensor, full, x))
    update = gradient
    if clips:
        norm = made.summed(made.call(aten.linalg_vector_norm.default, gradient))
        update = made.call(aten.div.Tensor, gradient, norm)
    if returns_gradients:
        made.returns(gradient, "grad", "a.w")
    if in_place:
        made.call(aten.add_.Tensor, shard, update)
    else:
        made.returns(made.call(aten.add.Tensor, shard, update), "param", "a.w")
    return made.read()


def two_gradients(made: Handmade, sizes: Sequence[int] = (4, 4)) -> tuple[list[fx.Node], list[fx.Node]]:
    """Shards of ``a.w`` and ``b.w``, and their reduced gradients, which are returned."""
    shards, x = [made.param(fqn, size) for fqn, size in zip(NAMES, sizes, strict=True)], made.batch(1)
    full = [made.gathered(shard) for shard in shards]
    made.loss(*full)
    gradients = [made.reduced(made.call(aten.mul.Tensor, one, x)) for one in full]
    for gradient, fqn in zip(gradients, NAMES, strict=True):
        made.returns(gradient, "grad", fqn)
    return shards, gradients


def updated(made: Handmade, shards: list[fx.Node], gradients: list[fx.Node], total: fx.Node) -> None:
    """Return parameters less their gradients, divided by ``total``."""
    for shard, gradient, fqn in zip(shards, gradients, NAMES, strict=True):
        made.returns(made.call(aten.add.Tensor, shard, made.call(aten.div.Tensor, gradient, total)), "param", fqn)


def sections(reading: GraphAnalysis) -> dict[str, list[str]]:
    lines = schedule_lines(schedule_of(reading, {"a.w": "a"}, {"0": "dp"}))
    found: dict[str, list[str]] = {}
    for line in lines[: lines.index("buckets")]:
        if line and not line.startswith(" "):
            found[line] = []
        elif line:
            found[list(found)[-1]].append(" ".join(line.split()))
    return found


REDUCED = ["launch reduce_scatter a", "wait reduce_scatter a"]


def test_an_update_in_place_and_one_that_is_returned_are_the_optimizer() -> None:
    for in_place in (True, False):
        found = sections(step(in_place=in_place, clips=False))
        assert found["optimizer"] == ["update a"]
        assert found["backward"][-2:] == REDUCED


def test_the_reduction_of_a_norm_to_clip_by_is_the_optimizers() -> None:
    found = sections(step(in_place=True, clips=True))
    assert found["backward"][-2:] == REDUCED
    assert [event for event in found["optimizer"] if "all_reduce" in event] == [
        "launch all_reduce norms", "wait all_reduce norms",
    ]  # fmt: skip


def test_gradients_that_nobody_returns_are_the_backwards_all_the_same() -> None:
    reading = step(in_place=True, clips=True, returns_gradients=False)
    assert [(bucket.kind, bucket.direction) for bucket in reading.buckets][1:] == [
        ("reduce_scatter", "backward"),
        ("all_reduce", "optimizer"),
    ]


def test_a_step_without_update_has_no_optimizer() -> None:
    made = Handmade()
    full = made.gathered(made.param("a.w", 4))
    made.loss(full)
    made.returns(made.reduced(made.call(aten.neg.default, full)), "grad", "a.w")
    assert "optimizer" not in sections(made.read())


def test_the_reduction_of_a_parameter_of_one_element_is_the_backwards() -> None:
    """Else no check that goes by direction would look at it."""
    made = Handmade()
    shard, x = made.param("a.gain", 1), made.batch(2)
    full = made.gathered(shard)
    made.loss(full)
    made.call(aten.add_.Tensor, shard, made.reduced(made.call(aten.mul.Tensor, full, x)))
    assert [(bucket.kind, bucket.direction) for bucket in made.read().buckets][1:] == [("reduce_scatter", "backward")]


@pytest.mark.parametrize("clips", [False, True])
def test_so_is_an_all_reduce_of_its_gradient_beside_that_of_a_norm(clips: bool) -> None:
    """Of a replicated parameter; the norm is of shards, and so of one element that is reduced, too."""
    made = Handmade()
    shard, gain, x = made.param("a.w", 4), made.param("a.gain", 1), made.batch(8)
    full = made.gathered(shard)
    made.loss(full, gain)
    gradients = [
        made.reduced(made.call(aten.mul.Tensor, full, x)),
        made.summed(made.call(aten.sum.dim_IntList, x, [0], True)),
    ]
    if clips:
        norms = made.call(aten._foreach_norm.Scalar, gradients)
        joined = made.call(aten.stack.default, [made.part(norms, i) for i in range(2)])
        norm = made.summed(made.call(aten.linalg_vector_norm.default, joined))
        gradients = [made.call(aten.div.Tensor, gradient, norm) for gradient in gradients]
    for parameter, gradient in zip((shard, gain), gradients, strict=True):
        made.call(aten.add_.Tensor, parameter, gradient)
    found = [bucket.direction for bucket in made.read().buckets if bucket.kind == "all_reduce"]
    assert found == ["backward"] + ["optimizer"] * clips


def test_a_shard_of_one_element_is_reduced_over_copies_too_in_the_backward() -> None:
    """Hybrid sharding: what a reduce-scatter brought is all-reduced."""
    made = Handmade()
    shard, x = made.param("a.gain", 1), made.batch(2)
    full = made.gathered(shard)
    made.loss(full)
    gradient = made.summed(made.reduced(made.call(aten.mul.Tensor, full, x)))
    norm = made.summed(made.call(aten.linalg_vector_norm.default, gradient))
    made.call(aten.add_.Tensor, shard, made.call(aten.div.Tensor, gradient, norm))
    directions = [(bucket.kind, bucket.direction) for bucket in made.read().buckets][1:]
    assert directions == [("reduce_scatter", "backward"), ("all_reduce", "backward"), ("all_reduce", "optimizer")]


def test_gradients_that_the_optimizer_reads_are_compared_by_the_audit() -> None:
    def swapped(first: int, second: int) -> GraphAnalysis:
        made = Handmade()
        shards, gradients = two_gradients(made)
        made.call(aten.add_.Tensor, shards[0], gradients[first])
        made.call(aten.add_.Tensor, shards[1], gradients[second])
        return made.read()

    assert list(update_problems(PROMISE, swapped(0, 1), swapped(0, 1))) == []
    assert list(update_problems(PROMISE, swapped(0, 1), swapped(1, 0))) == [
        "the update of param a.w reads the gradient of b.w, before the pass the gradient of a.w",
        "the update of param b.w reads the gradient of a.w, before the pass the gradient of b.w",
    ]


@pytest.mark.parametrize("clips", [False, True])
def test_a_gradient_that_the_update_writes_in_place_is_known_by_what_its_reduction_brought(clips: bool) -> None:
    """A fused optimizer says that it writes gradients; clipping does."""
    reading = WholeStep(kind="in_place", clips=clips).read()
    assert reading.problems == ()
    named = [bucket.fqns for bucket in reading.buckets if bucket.kind == "reduce_scatter"]
    assert named == [("c.b",), ("c.w",), ("b.b",), ("b.w",), ("a.b",), ("a.w",)]
    norms = [bucket.direction for bucket in reading.buckets if bucket.kind == "all_reduce"]
    assert norms == ["optimizer"] * clips


@pytest.mark.parametrize("kind", ["fused", "foreach", "plain", "in_place"])
@pytest.mark.parametrize("clips", [False, True])
def test_each_parameter_and_state_is_made_of_its_own_gradient_and_of_the_norms_to_clip_by(kind: Kind, clips: bool) -> None:
    step = WholeStep(kind=kind, by_entry=False, clips=clips)
    every = frozenset(one.fqn for one in step.held)
    found = {(one.role, one.fqn): one for one in step.read().updates}
    for one in step.held:
        for role, fqn in (("param", one.fqn), *(("state", f"{one.fqn}.{key}") for key in one.state if key != "step")):
            assert found[role, fqn].gradients == {one.fqn}
            assert found[role, fqn].norms == (every if clips else frozenset())
            own = {*(f"{one.fqn}.{key}" for key in one.state), one.fqn, step.inputs[len(step.inputs) - 2].fqn}
            assert found[role, fqn].inputs <= own
    counts = [one for one in found.values() if one.fqn.endswith(".step")]
    assert all(one.gradients == one.norms == frozenset() and one.inputs == {one.fqn} for one in counts)


def test_a_norm_of_each_gradient_that_is_reduced_in_one_launch_is_the_optimizers() -> None:
    """Several elements: as many as there are gradients."""
    made = Handmade()
    shards, gradients = two_gradients(made)
    norms = made.call(aten.stack.default, [made.call(aten.linalg_vector_norm.default, one) for one in gradients])
    updated(made, shards, gradients, made.call(aten.sum.default, made.summed(norms)))
    assert [b.direction for b in made.read().buckets if b.kind == "all_reduce"] == ["optimizer"]


NORMS: dict[str, Callable[[Handmade, fx.Node], fx.Node]] = {
    "norm": lambda made, gradient: made.call(aten.linalg_vector_norm.default, gradient),
    "norm that keeps its dimension": lambda made, gradient: made.call(aten.linalg_vector_norm.default, gradient, 2, [0], True),
    "norm of a list": lambda made, gradient: made.part(made.call(aten._foreach_norm.Scalar, [gradient]), 0),
    "sum of squares": lambda made, gradient: made.call(aten.sum.default, made.call(aten.pow.Tensor_Scalar, gradient, 2)),
    "product with itself": lambda made, gradient: made.call(aten.dot.default, gradient, gradient),
    "largest": lambda made, gradient: made.call(aten.amax.default, made.call(aten.abs.default, gradient)),
}


@pytest.mark.parametrize("way", NORMS)
def test_a_gradient_of_which_an_update_has_but_a_number_is_told_from_its_own(way: str) -> None:
    made = Handmade()
    shards, gradients = two_gradients(made, (4, 1) if way != "product with itself" else (4, 2))
    updated(made, shards, gradients, made.call(aten.add.Tensor, *(NORMS[way](made, one) for one in gradients)))
    assert [(one.fqn, one.gradients, one.norms) for one in made.read().updates] == [(fqn, {fqn}, set(NAMES)) for fqn in NAMES]


def test_a_part_of_one_element_is_no_norm() -> None:
    made = Handmade()
    shard, x = made.param("a.w", 4), made.batch(8)
    full = made.gathered(shard)
    made.loss(full)
    gradient = made.reduced(made.call(aten.mul.Tensor, full, x))
    made.returns(gradient, "grad", "a.w")
    part = made.call(aten.slice.Tensor, gradient, 0, 1, 2)
    made.returns(made.call(aten.add.Tensor, shard, made.call(aten.mul.Tensor, part, 2)), "param", "a.w")
    (update,) = made.read().updates
    assert (update.gradients, update.norms) == ({"a.w"}, frozenset())
