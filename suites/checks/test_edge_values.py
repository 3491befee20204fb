"""Bitwise sees what no batch and no output holds: edge values in its last step, and inputs as a step left them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

from pytest_fxbucket.checks.bitwise.job import BitwiseTask, put_edges, run
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.passes import manual_overlap_bucketing
from pytest_fxbucket.plan.schema_checks import Run
from pytest_fxbucket.plan.schema_model import Parallel
from pytest_fxbucket.step.mesh import shard_mesh
from pytest_fxbucket.step.portable import encode_module
from pytest_fxbucket.step.roles import Value


def clamped(gm: fx.GraphModule, plans: list[str | list[str]]) -> fx.GraphModule:
    """Buckets, and clamps what is read of parameters at a size that none has."""
    made = manual_overlap_bucketing(gm, plans)
    for node in list(made.graph.nodes):
        if node.target is torch.ops.aten.addmm.default:
            with made.graph.inserting_before(node):
                made_small = made.graph.call_function(torch.ops.aten.clamp.default, (node.args[2], -(2.0**19), 2.0**19))
            made_small.meta = dict(node.args[2].meta)
            node.replace_input_with(node.args[2], made_small)
    made.recompile()
    return made


@pytest.mark.parametrize(("steps", "outcome"), [(2, "passed"), (3, "failed")])
def test_a_pass_that_loses_large_numbers_is_red_in_the_step_that_holds_them(
    bitwise: Callable[..., Verdict], steps: int, outcome: str
) -> None:
    clamping = {"pass_name": "suites.checks.test_edge_values:clamped"}
    verdict = bitwise(settings=clamping, run=Run(steps=steps, backend="local"))
    assert verdict.outcome == outcome
    assert any(line.startswith("step 2, rank 0: ") for line in verdict.lines) == (steps == 3)


def test_edges_go_into_a_copy_of_what_a_factory_gives(bitwise: Callable[..., Verdict]) -> None:
    """A batch may be a view of a data set, here one that cannot be written."""
    verdict = bitwise(model={"batch": "bitwise_models:repeated_batch"}, run=Run(steps=3, backend="local"))
    assert verdict.outcome == "passed", verdict


def test_edges_go_into_floating_parameters_alone_and_are_the_same_for_the_same_shape() -> None:
    one, other, ints = torch.ones(2, 4).t(), torch.zeros(3, dtype=torch.bfloat16), torch.ones(4, dtype=torch.int64)
    put_edges([one, other, ints])
    flat = one.flatten()
    assert torch.signbit(flat[:2]).tolist() == [True, False]
    assert flat[:2].tolist() == [0.0, 0.0]
    assert 0 < flat[2] < torch.finfo(torch.float32).tiny
    assert flat[3] < 0
    assert flat[4:].tolist() == [2.0**20, -(2.0**15), 1.0, 1.0]
    assert torch.signbit(other).tolist() == [True, False, False]
    assert other[2] > 0
    assert ints.tolist() == [1, 1, 1, 1]


def test_the_large_numbers_of_float16_are_finite() -> None:
    half = torch.zeros(6, dtype=torch.float16)
    put_edges([half])
    assert half[4:].tolist() == [32752.0, -16376.0]


# A bare graph's inputs are compared too, as the step left them.


def writing(amount: float) -> fx.GraphModule:
    graph = fx.Graph()
    given = graph.placeholder("given")
    graph.call_function(torch.ops.aten.add_.Tensor, (given, amount))
    graph.output([graph.call_function(torch.ops.aten.zeros.default, ([1],))])
    return fx.GraphModule(torch.nn.Module(), graph)


def task(amount: float) -> BitwiseTask:
    one = (Value("value", "0", (2,), torch.float32),)
    return BitwiseTask(
        unbucketed=encode_module(writing(1.0)),
        bucketed=encode_module(writing(amount)),
        steps=1,
        inputs=one,
        outputs=one,
        model=None,
        example_inputs=(torch.ones(2),),
        seed=0,
        where="plan.toml",
        mesh=shard_mesh(1),
        parallel=Parallel(),
        parameters=(),
        optimizing=None,
    )


def test_a_pass_that_writes_something_else_to_an_input_is_seen() -> None:
    assert run(0, 1, task(1.0)).differences == []
    assert [(d.what, d.elements) for d in run(0, 1, task(2.0)).differences] == [("input", 2)]


def test_the_norm_of_a_complex_gradient_is_of_both_its_halves() -> None:
    graph = fx.Graph()
    graph.output([graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("given"), 3j))])
    turned = encode_module(fx.GraphModule(torch.nn.Module(), graph))
    gradient = Value("grad", "w", (2,), torch.complex64)
    found = run(0, 1, replace(task(1.0), unbucketed=turned, bucketed=turned, outputs=(gradient,)))
    assert found.squares == [{"w": pytest.approx(18.0)}]
