"""What a transformation of a user breaks, as bitwise sees it on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings

PLAN = """
[model]
factory = "fixtures.models.llama:build"
args = { layers = 2, dim = 16, heads = 2, kv_heads = 1 }
batch = "fixtures.models.llama:batch"
loss = "fixtures.models.llama:loss"

[parallel]
dp_shard = 2

[optimizer]
factory = "torch.optim:SGD"
args = { lr = 0.1 }
groups = "entry"

[bucket]
plan = ["tok_embeddings", "layers.[0-1]", "norm+output"]

[run]
steps = 1
"""


@pytest.mark.parametrize("order", [("{}", "bucket"), ("bucket", "{}")])
def test_the_learning_rate_of_another_group_is_seen(order: tuple[str, str], tmp_path: Path, pools: Pools) -> None:
    """All rates are the same in the plan, and there is but one step."""
    path = tmp_path / "plan.toml"
    outcomes = {}
    for name in ("same", "one_rate"):
        tables = (f'[[transform]]\nname = "{one.format(f"suites.transforms.own_transforms:{name}")}"\n' for one in order)
        path.write_text(PLAN + "".join(tables))
        run = PlanRun(load_plans(path)[0], RunSettings(tmp_path, tmp_path / "golden", tmp_path / "artifacts"), pools)
        outcomes[name] = run.check("bitwise").outcome
    assert outcomes == {"same": "passed", "one_rate": "failed"}
