"""The last step of bitwise holds what no batch does: a pass that loses it is red there, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from pytest_fxbucket.checks.bitwise.job import put_edges
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.passes import manual_overlap_bucketing
from pytest_fxbucket.plan.schema import Run


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
