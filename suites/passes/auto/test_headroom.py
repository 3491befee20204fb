"""What may be in flight at once, where a wait stands behind the launch of another."""

from __future__ import annotations

import pytest
from torch import fx

from pytest_fxbucket.compat.c10d import c10d_functional
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.passes.auto.estimates import Estimates
from pytest_fxbucket.passes.auto.schedule import scheduled
from pytest_fxbucket.plan.schema_bucket import Overlap
from suites.graph.handmade import GROUP, RANKS, Handmade, aten
from suites.passes.auto.test_by_itself import PLAIN

ALL_FREE = Estimates(lambda node: 0.0, PLAIN)


def into(made: Handmade, sent: fx.Node, out: fx.Node) -> fx.Node:
    return made.call(c10d_functional().all_gather_into_tensor_out.default, sent, RANKS, GROUP, out=out)


def waits_cross() -> fx.Graph:
    """Two launches write what a gather sent and what it brought, and it is waited for once more behind both."""
    made = Handmade(RANKS)
    shard, other, third = (made.param(name, 4) for name in "abc")
    first = made.gather(shard)
    whole = made.wait(first)
    launches = [into(made, made.call(aten.slice.Tensor, other, 0, 0, 2), shard), into(made, third, whole)]
    for again in (first, *launches):
        made.returns(made.wait(again))
    return made.finish()


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (Overlap(max_prefetch=1), "max_prefetch = 1"),
        (Overlap(max_in_flight_gb=32 / (1 << 30)), "max_in_flight_gb = 2.98023e-08"),
    ],
)
def test_launches_of_which_one_is_waited_for_behind_the_other_are_named_if_only_one_may_fly(limits: Overlap, says: str) -> None:
    with pytest.raises(PlanError) as refused:
        scheduled(waits_cross(), ALL_FREE, limits)
    assert str(refused.value) == (
        f"[overlap] {says} leaves no room for all_gather_into_tensor_out_default_1 beside all_gather_into_tensor_out_default, "
        "which can only be waited for behind it"
    )
