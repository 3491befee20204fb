"""The schema as data: every key says what it is for, and none is missing or new."""

from __future__ import annotations

from pytest_fxbucket.plan import schema

KEYS = list(schema.keys())


def test_every_key_says_what_it_is_for_and_what_it_takes() -> None:
    assert [key for key in KEYS if not key.rule.expects or not key.rule.doc] == []


def test_the_keys_are_those_of_the_design() -> None:
    assert {(key.table, key.key) for key in KEYS} == {
        *[("model", key) for key in ("factory", "args", "batch", "loss", "inputs", "may_be_idle")],
        *[("graph", key) for key in ("factory", "may_be_idle")],
        *[("parallel", key) for key in ("mode", "dp_shard", "dp_replicate", "tp", "pp", "param_dtype", "reduce_dtype")],
        *[("parallel", key) for key in ("reshard_after_forward", "reduce_order", "tp_plan", "cp", "cp_form", "ep", "ep_plan")],
        *[("pipeline", key) for key in ("cuts", "stages", "balance", "schedule")],
        *[("step", key) for key in ("microbatches", "checkpoint", "clip_norm", "reuse_layers")],
        *[("override", key) for key in ("module", "type", "by", "args", "output")],
        *[("optimizer", key) for key in ("factory", "args", "params", "groups", "schedule")],
        *[("bucket", key) for key in ("enabled", "plan", "by", "layout", "dtypes", "cap_mb", "packer", "unplanned")],
        *[("overlap", key) for key in ("prefetch", "defer_reduce", "insert_overlap_deps", "gather_group")],
        *[("overlap", key) for key in ("launch_at", "wait_before", "updates", "schedule", "max_memory_increase")],
        *[("overlap", key) for key in ("max_memory_increase_gb", "max_in_flight_gb", "max_prefetch")],
        ("pass", "of"),
        *[("transform", key) for key in ("name", "args")],
        *[("run", key) for key in ("backend", "world", "steps", "seed", "timeout_s", "reduce", "ring", "ranks_per_gpu")],
        ("run", "compiler"),
        *[("checks", key) for key in ("audit", "golden", "collectives", "same", "bitwise", "eager", "benchmark")],
        ("checks", "overlap"),
        ("checks", "memory"),
        ("checks", "mutation"),
        *[("cluster", key) for key in ("preset", "tflops", "memory_bandwidth", "memory_gb", "devices_per_node", "within")],
        *[("cluster", key) for key in ("between", "compute_efficiency", "memory_efficiency", "network_efficiency", "cost")],
        *[("cluster", key) for key in ("launch_us", "view_us", "enqueue_us", "enqueue_us_per_mb", "wait_us", "kernel_us")],
        *[("cluster", key) for key in ("collective_us", "blocking", "allocation_bytes")],
        *[("eager", key) for key in ("factory", "args", "rounds_otherwise")],
    }
