"""The schema as data: every key says what it is for, and none is missing or new."""

from __future__ import annotations

import dataclasses

import pytest

from pytest_fxbucket.plan import schema

KEYS = list(schema.keys())


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
