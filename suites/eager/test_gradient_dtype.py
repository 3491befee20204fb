"""When ``eager`` says that gradients part by design, since FSDP2 from torch 2.15 on makes them in ``reduce_dtype``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from pytest_fxbucket.checks.bitwise.job import TensorDifference
from pytest_fxbucket.eager.reasons import gradients_alone, made_equal, reasons_of
from pytest_fxbucket.eager.unit_calls import UnitCalls
from pytest_fxbucket.plan.schema import Plan
from suites.eager import eager_net


@dataclass
class Rank:
    """What one rank saw."""

    differences: list[TensorDifference]


def ranks(*found: tuple[int, int, str, str]) -> list[Rank]:
    """Two, which saw tensors differ: in which step, on which rank, what, of which parameter."""
    every = [TensorDifference(step, rank, what, fqn, 1, 8, 1) for step, rank, what, fqn in found]
    return [Rank([one for one in every if one.rank == rank]) for rank in range(2)]


WEIGHTS = ranks((1, 0, "gradient", "a"), (1, 1, "gradient", "a"), (1, 1, "gradient", "b"), (1, 0, "parameter", "a"))


@pytest.mark.parametrize(
    ("seen", "is_alone"),
    [
        (WEIGHTS, True),
        (ranks((1, 0, "gradient", "a"), (1, 1, "loss", "")), False),
        (ranks((1, 0, "parameter", "a")), False),
        (ranks((1, 0, "parameter", "a"), (2, 1, "gradient", "a")), False),
        (ranks((1, 0, "gradient", "a"), (2, 1, "loss", "")), True),
        (ranks(), False),
    ],
    ids=["gradients", "a loss", "an update", "an update first", "gradients first", "nothing"],
)
def test_how_gradients_are_made_can_be_why_only_where_losses_are_alike(seen: list[Rank], is_alone: bool) -> None:
    assert gradients_alone(seen) == is_alone


@pytest.mark.parametrize(
    ("stated", "is_why"),
    [
        (ranks(), True),
        (ranks((1, 0, "gradient", "a"), (1, 1, "gradient", "a")), True),
        (ranks(*((2, rank, "gradient", fqn) for rank in (0, 1) for fqn in "ab")), True),
        (WEIGHTS, False),
        (ranks((0, 0, "gradient", "b")), False),
    ],
    ids=["all are equal", "one is equal", "equal so far", "none is equal", "others differ before"],
)
def test_it_is_why_only_where_a_gradient_is_equal_without_it(stated: list[Rank], is_why: bool) -> None:
    assert made_equal(WEIGHTS, stated) == is_why


@pytest.mark.parametrize(
    ("is_newer", "param", "reduced", "has_it"),
    [
        (True, "bfloat16", "float32", True),
        (False, "bfloat16", "float32", False),
        (True, "bfloat16", "bfloat16", False),
        (True, None, "bfloat16", True),
        (True, "bfloat16", None, False),
    ],
)
def test_a_plan_has_it_where_a_newer_torch_reduces_in_another_dtype(
    is_newer: bool, param: str | None, reduced: str | None, has_it: bool
) -> None:
    plan: Plan = eager_net.plan_of()
    plan = replace(plan, parallel=replace(plan.parallel, param_dtype=param, reduce_dtype=reduced))
    found = reasons_of(eager_net.build(), plan, UnitCalls(), makes_gradients_to_reduce=is_newer)
    assert found == (("gradient_dtype",) if has_it else ())
