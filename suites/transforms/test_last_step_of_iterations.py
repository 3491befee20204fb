"""A captured step whose work crosses iterations, on real ranks: bitwise eager's after ``last_step``, a call behind before."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

from pytest_fxbucket.capture import StepGraph
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.train_step import capture_step
from pytest_fxbucket.transforms import transformation
from suites.train_step.step_twins import Twins, batch, differing, net, sgd, usual

JOBS = "suites.transforms.iteration_jobs"


def run(pools: Pools, job: str, payload: Any, ranks: int = 2) -> list[Any]:
    return pools.get(ranks).run(f"{JOBS}:{job}", [payload] * ranks, timeout_s=100, what=job)


@pytest.mark.parametrize(
    ("ranks", "gradients", "fused", "counts"),
    [(2, "cleared first", True, [1, 2, 4]), (3, "cleared first", False, [2]), (2, "cleared last", True, [3])],
)
def test_one_step_and_many_end_as_eager_does_with_a_learning_rate_for_each(
    pools: Pools, ranks: int, gradients: str, fused: bool, counts: list[int]
) -> None:
    for found in run(pools, "differing", (gradients, fused, counts), ranks):
        assert found == {count: [] for count in counts}


def test_what_is_behind_and_what_begins_anew(pools: Pools) -> None:
    for found in run(pools, "later", None):
        assert found["behind"]
        assert all(name.startswith(("2.", "3.", "optimizers.")) for name in found["behind"])
        assert found["finished"] == []
        assert found["begun anew"] == []
        assert found["raised"]


def test_what_is_behind_may_not_be_changed(pools: Pools) -> None:
    for found in run(pools, "changed", None):
        assert found[0].startswith(
            "parameter 3.weight was changed between two calls, while its update of the last one is still to"
        )
        assert found[1].startswith("state 2.bias.exp_avg was changed between two calls")
        assert found[2].startswith("state ")
        assert all(text.endswith("make the call before with last_step=True") for text in found)


def test_gradients_must_be_of_one_step(pools: Pools) -> None:
    for adding in run(pools, "refused", None):
        assert adding.startswith("the step looks at the gradient of 2.weight that was there before")
        assert adding.endswith("begin it with zero_grad()")


def test_without_such_a_transform_last_step_is_the_functions_own() -> None:
    model = net()
    optimizers = [sgd(model)]
    inner = usual(model, optimizers)

    def step(x: Any, y: Any, last_step: bool = False) -> Any:
        return inner(x, y), last_step

    captured = capture_step(step, model=model, optimizers=optimizers)
    assert captured(*batch(0), last_step=True)[1] is True
    assert captured(*batch(0))[1] is False
    assert captured.traces == 2


def test_a_transform_of_ones_own_that_crosses_says_so() -> None:
    @transformation(keeps_collectives=False)
    def crossing(step: Any, state: Any) -> Any:
        phases = ("setup", "steady", "cleanup")
        inputs, outputs, graphs = (
            {phase: one["joint"] for phase in phases} for one in (step.inputs, step.outputs, step.graphs)
        )
        return replace(step, graphs=graphs, inputs=inputs, outputs=outputs)

    model: nn.Module = net()
    optimizers = [sgd(model)]
    captured = capture_step(usual(model, optimizers), model=model, optimizers=optimizers, transforms=[crossing])
    with pytest.raises(CaptureError, match=r"did not say so; mark it with @transformation\(crosses_iterations=True\)"):
        captured(*batch(0))


finished: list[str] = []


def finish() -> None:
    finished.append("finished")
    if len(finished) == 1:
        raise RuntimeError("no memory")


@transformation(keeps_collectives=False, crosses_iterations=True)
def counts_what_it_finishes(step: StepGraph, state: Any) -> StepGraph:
    """The whole step is in each call, but for a call of ``finish`` that each leaves, if the batch has four rows."""
    if any(value.shape == (5, 6) for value in step.inputs["joint"]):
        return step
    cleanup = fx.Graph()
    cleanup.call_function(finish)
    cleanup.output(())
    joint, inputs, outputs = step.graphs["joint"], step.inputs["joint"], step.outputs["joint"]
    return replace(
        step,
        graphs={"setup": joint, "steady": joint, "cleanup": fx.GraphModule(nn.Module(), cleanup)},
        inputs={"setup": inputs, "steady": inputs, "cleanup": ()},
        outputs={"setup": outputs, "steady": outputs, "cleanup": ()},
    )


def crossing_twins() -> Twins:
    return Twins(lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), transforms=[counts_what_it_finishes])


def test_a_step_whose_rest_fails_has_been_taken_and_leaves_the_rest_to_the_next_call() -> None:
    finished.clear()
    pair = crossing_twins()
    for run, more in zip(pair.each(), ({}, {"last_step": True}), strict=True):
        torch.manual_seed(0)
        with pytest.raises(RuntimeError, match="no memory") if more else nullcontext():
            run.step(*batch(0), **more)
    assert differing(*pair.each()) == []
    pair.same(*batch(1))
    assert finished == ["finished"]


def test_a_traced_step_that_leaves_nothing_finishes_what_another_left() -> None:
    finished[:] = ["before"]
    pair = crossing_twins()
    pair.same(*batch(0))
    assert finished == ["before"]
    pair.same(*batch(1, rows=5))
    assert finished == ["before", "finished"]
