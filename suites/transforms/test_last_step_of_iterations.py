"""A captured step whose work crosses iterations, on real ranks: bitwise eager's after ``last_step``, a call behind before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.train_step import capture_step
from pytest_fxbucket.transforms import transformation
from suites.train_step.step_twins import batch, net, sgd, usual

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
