"""Audit has nothing to say of our pass on random steps that gather entries again and again, however far it may prefetch."""

from __future__ import annotations

import pytest

from pytest_fxbucket.checks.promises.kept import audit
from pytest_fxbucket.fuzz.program import copied, fake_groups
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.targets import by_parameter
from suites.checks.promising import promise_by
from suites.fuzz.drawn_rounds import WORLD, DrawnStep

STEPS = 60


def problems(number: int, prefetch: int) -> list[str]:
    """What audit says of the step of the seed ``number`` behind our pass."""
    step = DrawnStep(number)
    after = copied(step.graph_module)
    before = step.read(step.graph_module.graph)
    with fake_groups(WORLD, {}):
        targets = by_parameter(after.graph, before, step.inputs, step.entry_of, outputs=step.outputs)
        ManualPass.of(prefetch=prefetch).run(after.graph, targets)
    promise = promise_by(step.entry_of, prefetch=prefetch, reshard_after_forward=None, is_traced_here=False)
    return audit(promise, before, step.read(after.graph))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_rounds_that_are_used_in_turn_are_green(prefetch: int) -> None:
    found = {number: lines for number in range(prefetch, STEPS, 4) if (lines := problems(number, prefetch))}
    assert found == {}
