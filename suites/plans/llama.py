"""The text of a plan for a small Llama: callers say what differs, and append further tables."""

from __future__ import annotations

from pathlib import Path

from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.toml_text import to_toml

ROOT = Path(__file__).parents[2]
BUCKETS = """
[bucket]
plan = ["tok_embeddings", "layers.*", "norm+output"]
"""
"""One for each layer."""


def head(
    args: str = "layers = 1, dim = 32", ranks: int = 2, *, batch: str = "fixtures.models.llama:batch", **parallel: object
) -> str:
    """The model with these arguments, sharded over so many ranks, with further keys of ``[parallel]``; no bucket yet."""
    keys = "\n".join(f"{key} = {to_toml(value)}" for key, value in {"dp_shard": ranks, **parallel}.items())
    return f"""
[model]
factory = "fixtures.models.llama:build"
args = {{ {args} }}
batch = "{batch}"
loss = "fixtures.models.llama:loss"

[parallel]
{keys}
"""


def llama(
    args: str = "layers = 1, dim = 32", ranks: int = 2, *, batch: str = "fixtures.models.llama:batch", **parallel: object
) -> str:
    """The same with a bucket for each layer, whose table is the last one: keys that are appended are its own."""
    return head(args, ranks, batch=batch, **parallel) + BUCKETS


LLAMA = llama()
MIXED = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
"""Keys of ``[parallel]``."""


def plan_of(text: str, name: str) -> Plan:
    """The plan above the rows, as from a file of that name in the root."""
    return parse_plans(text, ROOT / name)[0]
