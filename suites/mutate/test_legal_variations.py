"""No check of values or of hangs is red where a graph is another one of the same program, and audit tells the truth of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.ranks.pools import Pools
from suites.mutate.broken_plans import ROOT, BrokenPlan
from suites.mutate.legal import ORDERS, variations

TRUE = {
    "unbucketed": "launches, expected 1",
    "execution layout": "of the layout is ",
    "prefetch 3": "earlier than prefetch = 1",
    "no deferral": "it is not deferred",
}
"""What audit says of the promise that is not kept."""


@pytest.mark.parametrize(("plan", "world"), [("adamw", {"dp_shard": 2}), ("uneven", {})], ids=["adamw", "uneven"])
def test_only_audit_is_red_and_it_is_true(plan: str, world: dict[str, int], pools: Pools, tmp_path: Path) -> None:
    """Two ranks have all orders of bytes that four have; only uneven sizes want more."""
    as_it_is = BrokenPlan(f"{ROOT}/fixtures/plans/{plan}.toml", pools, tmp_path, world)
    seen = dict[str, str]()
    for variation in variations(as_it_is.world):
        varied = as_it_is.world.spoiled(variation.spoil)
        red = [check for check in ("collectives", "same", "bitwise") if not as_it_is.said_of(check, varied)]
        assert not red, variation.name
        seen[variation.name] = "\n".join(as_it_is.said_of("audit", varied).lines)
    assert {name: TRUE[name] for name in TRUE if TRUE[name] not in seen[name]} == {}
    assert len(seen) == len(TRUE) + ORDERS
