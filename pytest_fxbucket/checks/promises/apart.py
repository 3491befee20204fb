"""What a plan can promise of collectives in graphs of their own: whoever calls the graphs decides what runs beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_fxbucket.step.graph_sequence import is_handed_on

if TYPE_CHECKING:
    from pytest_fxbucket.checks.promises.expectations import Expectations
    from pytest_fxbucket.step.roles import StepGraph


def kept_apart(promise: Expectations, step: StepGraph) -> tuple[Expectations, str]:
    """``promise`` without what graphs that run apart cannot keep, and a clause that says what was left out; empty: nothing.

    What a launch placed by hand needs, compute in its graph, the pass itself finds missing.
    """
    if not is_handed_on(step):
        return promise, ""
    names = (
        ["overlap with compute"] if promise.reshard_after_forward is None else ["overlap with compute", "reshard_after_forward"]
    )
    said = f"left out, since whoever calls the graphs decides it: {' and '.join(names)}"
    return replace(promise, reshard_after_forward=None), said
