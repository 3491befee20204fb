"""The text of a plan for a small Llama, in the parameters that tests choose."""

from __future__ import annotations

from pathlib import Path

from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema import Plan

ROOT = Path(__file__).parents[2]


def llama(args: str = "layers = 1, dim = 32", ranks: int = 2) -> str:
    """One with these arguments of the model, a bucket for each layer, on so many ranks."""
    return f"""
[model]
factory = "fixtures.models.llama:build"
args = {{ {args} }}
batch = "fixtures.models.llama:batch"
loss = "fixtures.models.llama:loss"

[parallel]
dp_shard = {ranks}

[bucket]
plan = ["tok_embeddings", "layers.*", "norm+output"]
"""


LLAMA = llama()


def plan_of(text: str, name: str) -> Plan:
    """The plan above the rows, as from a file of that name in the root."""
    return parse_plans(text, ROOT / name)[0]
