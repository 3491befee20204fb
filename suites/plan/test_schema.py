"""The schema as data: nothing in it may be read and ignored."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pytest_fxbucket.plan import PlanError, parse_plans, schema
from pytest_fxbucket.words import show

# A value beside the default for every key whose values cannot be listed.
SECOND: dict[tuple[str, str], str] = {
    ("eager", "factory"): '"n:Trainer"',
    ("eager", "args"): "{ lr = 0.1 }",
    ("eager", "rounds_otherwise"): '["reused_unit"]',
    ("model", "factory"): '"n:build"',
    ("model", "batch"): '"n:batch"',
    ("model", "args"): "{ layers = 2 }",
    ("model", "loss"): '"n:loss"',
    ("model", "inputs"): '["x"]',
    ("graph", "factory"): '"n:step"',
    ("parallel", "mode"): '"hybrid_shard"',
    ("parallel", "dp_shard"): "8",
    ("parallel", "dp_replicate"): "2",
    ("parallel", "tp"): "2",
    ("parallel", "tp_plan"): '{ "a" = "colwise" }',
    ("parallel", "ep"): "2",
    ("parallel", "ep_plan"): '["a"]',
    ("parallel", "pp"): "2",
    ("optimizer", "factory"): '"torch.optim:SGD"',
    ("optimizer", "args"): "{ lr = 0.1 }",
    ("optimizer", "params"): '["a"]',
    ("optimizer", "groups"): '"entry"',
    ("step", "microbatches"): "2",
    ("step", "checkpoint"): '["a"]',
    ("step", "clip_norm"): "0.5",
    ("override", "module"): '["a"]',
    ("override", "type"): '"n:Moe"',
    ("override", "by"): '"n:dense"',
    ("override", "args"): "{ experts = 4 }",
    ("override", "output"): '"n:output"',
    ("bucket", "plan"): '["b"]',
    ("bucket", "cap_mb"): "25",
    ("bucket", "packer"): '"backend:pack"',
    ("overlap", "prefetch"): "2",
    ("overlap", "launch_at"): '{ forward = { a = "b" } }',
    ("overlap", "wait_before"): '{ forward = { a = "b" } }',
    ("transform", "name"): '"own:change"',
    ("transform", "args"): "{ a = 1 }",
    ("run", "world"): "{ dp_shard = 2 }",
    ("run", "steps"): "2",
    ("run", "seed"): "1",
    ("run", "timeout_s"): "7",
    ("run", "zero_gradients"): '["a"]',
    ("run", "ring"): "{ nodes = 2 }",
}
HYBRID = {"parallel.mode": '"hybrid_shard"', "parallel.dp_replicate": "2"}
SGD = {"optimizer.factory": '"torch.optim:SGD"'}
# What has to stand beside it, or it would have no meaning.
BESIDE: dict[tuple[str, str], dict[str, str]] = {
    ("parallel", "mode"): HYBRID,
    ("parallel", "dp_replicate"): HYBRID,
    ("parallel", "reduce_order"): HYBRID,
    ("parallel", "tp"): {"parallel.tp_plan": '{ "a" = "colwise" }'},
    ("parallel", "tp_plan"): {"parallel.tp": "2"},
    ("parallel", "ep"): {"parallel.ep_plan": '["a"]'},
    ("parallel", "ep_plan"): {"parallel.ep": "2"},
    ("step", "clip_norm"): SGD,
    **{("optimizer", key): SGD for key in ("args", "params", "groups")},
    ("transform", "args"): {"transform.name": '"own:change"'},
    ("overlap", "updates"): SGD,
    **{("override", key): {"override.module": '["a"]'} for key in ("by", "output")},
    ("override", "args"): {"override.module": '["a"]', "override.by": '"n:dense"'},
    ("run", "ring"): {"run.reduce": '"ring"'},
    ("bucket", "by"): {"bucket.plan": "[]", "bucket.cap_mb": "25"},
}
KEYS = list(schema.keys())


def source(table: str, key: str, value: str) -> str:
    subject = {"graph": {"factory": '"m:step"'}} if table == "graph" else {"model": {"factory": '"m:b"', "batch": '"m:x"'}}
    tables: dict[str, dict[str, str]] = {**subject, "parallel": {"dp_shard": "4"}, "bucket": {"plan": '["a", "b"]'}}
    for name, beside in {**BESIDE.get((table, key), {}), f"{table}.{key}": value}.items():
        tables.setdefault(name.partition(".")[0], {})[name.partition(".")[2]] = beside
    body = (f"[{name}]\n" + "".join(f"{k} = {v}\n" for k, v in pairs.items()) for name, pairs in tables.items())
    return "".join(body)


def second_values(key: schema.Key) -> list[str]:
    listed = [show(choice) for choice in key.choices if choice != key.default]
    return listed or [SECOND[key.table, key.key]]


@pytest.mark.parametrize("key", KEYS, ids=[f"{key.table}.{key.key}" for key in KEYS])
def test_every_key_set_to_a_second_value_changes_the_plan_or_is_refused_by_name(key: schema.Key) -> None:
    built = [is_taken(key, value) for value in second_values(key)]
    assert any(built) == key.built


def is_taken(key: schema.Key, value: str) -> bool:
    """Tell a value that reaches the plan from one that is refused by name; anything else fails the test."""
    try:
        (plan,) = parse_plans(source(key.table, key.key, value), Path("p.toml"))
    except PlanError as error:
        refusal = str(error)
    else:
        read = getattr(plan, key.table)
        assert getattr(read[0] if schema.may_be_several(key.table) else read, key.key) != key.default
        return True
    assert f"[{key.table}]" in refusal
    assert "not built yet" in refusal
    return False


def test_every_key_says_what_it_is_for_and_what_it_takes() -> None:
    for table, key, *_ in KEYS:
        rule = schema.rule_of(table, key)
        assert rule.expects, (table, key)
        assert rule.doc, (table, key)


@pytest.mark.parametrize("key", [key for key in KEYS if key.default is not dataclasses.MISSING and key.choices])
def test_the_default_of_a_choice_is_one_that_is_built(key: schema.Key) -> None:
    rule = schema.rule_of(key.table, key.key)
    assert key.default is None or key.default in rule.choices


def test_the_keys_are_those_of_the_design() -> None:
    assert {(key.table, key.key) for key in KEYS} == {
        *[("model", key) for key in ("factory", "args", "batch", "loss", "inputs")],
        ("graph", "factory"),
        *[("parallel", key) for key in ("mode", "dp_shard", "dp_replicate", "tp", "pp", "param_dtype", "reduce_dtype")],
        *[("parallel", key) for key in ("reshard_after_forward", "reduce_order", "tp_plan", "ep", "ep_plan")],
        *[("step", key) for key in ("microbatches", "checkpoint", "clip_norm", "reuse_layers")],
        *[("override", key) for key in ("module", "type", "by", "args", "output")],
        *[("optimizer", key) for key in ("factory", "args", "params", "groups")],
        *[("bucket", key) for key in ("enabled", "plan", "by", "layout", "dtypes", "cap_mb", "packer", "unplanned")],
        *[("overlap", key) for key in ("prefetch", "defer_reduce", "insert_overlap_deps", "gather_group")],
        *[("overlap", key) for key in ("launch_at", "wait_before", "updates")],
        *[("transform", key) for key in ("name", "args")],
        *[("run", key) for key in ("backend", "world", "steps", "seed", "timeout_s", "zero_gradients", "reduce", "ring")],
        *[("checks", key) for key in ("audit", "golden", "collectives", "same", "bitwise", "eager", "benchmark")],
        *[("eager", key) for key in ("factory", "args", "rounds_otherwise")],
    }
