"""No check of values or of hangs is red where a graph is another one of the same program, and audit tells the truth of it."""

from __future__ import annotations

from pathlib import Path

from pytest_fxbucket.mutate.mutant import SpoiledPlan
from pytest_fxbucket.ranks.pools import Pools
from suites.mutate.broken_plans import BrokenPlan
from suites.mutate.legal import ORDERS, variations

PLAN = """
[model]
factory = "fixtures.models.uneven:build"
args = { blocks = 2 }
batch = "fixtures.models.uneven:batch"
loss = "fixtures.models.uneven:loss"

[parallel]
dp_shard = 3
param_dtype = "bfloat16"
reduce_dtype = "float32"

[step]
clip_norm = 0.5

[optimizer]
factory = "torch.optim:AdamW"
args = { lr = 0.01 }

[bucket]
plan = ["embed", "blocks.0", "blocks.1", "norm+head"]
"""
"""A whole step in one graph, whose shards are of several sizes."""
TRUE = {
    "unbucketed": "launches, expected 1",
    "execution layout": "of the layout is ",
    "prefetch 3": "earlier than prefetch = 1",
    "no deferral": "it is not deferred",
}
"""What audit says of the promise that is not kept."""


def test_only_audit_is_red_and_it_is_true(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    as_it_is = BrokenPlan(f"{tmp_path}/plan.toml", pools, tmp_path)
    seen = dict[str, str]()
    for variation in variations(as_it_is.world):
        varied = SpoiledPlan(as_it_is.world, variation.spoil)
        red = [check for check in ("collectives", "same", "bitwise") if not as_it_is.said_of(check, varied)]
        assert not red, variation.name
        seen[variation.name] = "\n".join(as_it_is.said_of("audit", varied).lines)
    assert {name: TRUE[name] for name in TRUE if TRUE[name] not in seen[name]} == {}
    assert len(seen) == len(TRUE) + ORDERS
