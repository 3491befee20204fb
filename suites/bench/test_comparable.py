"""Whether two runs may be compared at all, and what is said of what differs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_fxbucket.bench.record import Record
from pytest_fxbucket.bench.store import comparable
from suites.bench.records import MACHINE, WORKLOAD, record


def test_commit_pass_torch_and_python_may_differ() -> None:
    other = {
        "commit": None,
        "pass": "torch",
        "torch": "2.14.0",
        "python": "3.12.1",
        "graphs": {},
        "time": "2027-01-01T00:00:00+00:00",
    }
    assert comparable(record(), record(**other)) == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"plan": "b.toml"}, "another plan: plans/tiny.toml, not b.toml"),
        ({"row": "x"}, "another plan: plans/tiny.toml, not plans/tiny.toml[x]"),
        ({"backend": "nccl"}, "backend was gloo and is nccl"),
        ({"ranks": 4}, "ranks was 2 and is 4"),
        (
            {"machine": {**MACHINE, "cpu": "Xeon", "cores": 8}},
            "another machine: cores was 2 and is 8, cpu was AMD EPYC 9B14 and is Xeon",
        ),
        ({"machine": {**MACHINE, "gpus": ["NVIDIA H200"]}}, "another machine: gpus was none and is NVIDIA H200"),
        (
            {"workload": {**WORKLOAD, "parallel": {"dp_shard": 4, "mode": "simple_fsdp"}}},
            "[parallel] dp_shard was 2 and is 4",
        ),
        ({"workload": {**WORKLOAD, "graph": {"factory": "a:b"}}}, "[graph] was not there and is a table of 1"),
        (
            {"workload": {**WORKLOAD, "model": {"factory": "tiny:build", "args": {"layers": 3}}}},
            "[model] args.layers was 2 and is 3",
        ),
        (
            {"workload": {**WORKLOAD, "step": {name: 1 for name in "abcde"}}},
            "[step] a was not there and is 1, [step] b was not there and is 1, [step] c was not there and is 1 and 3 more",
        ),
    ],
)
def test_what_differs_is_named_with_both_values(changed: dict[str, Any], reason: str) -> None:
    assert comparable(record(), record(**changed)) == [reason]


def test_tables_of_a_list_are_compared_one_by_one() -> None:
    then, now = ([{"factory": "torch.optim:SGD", "args": {"lr": lr}}] for lr in (0.1, 0.2))
    reasons = comparable(*(record(workload={**WORKLOAD, "optimizer": each}) for each in (then, now)))
    assert reasons == ["[optimizer] args.lr was 0.1 and is 0.2"]


def test_not_a_number_is_itself_and_true_is_not_1() -> None:
    def with_args(text: str) -> Record:
        return record(workload={**WORKLOAD, "model": {"factory": "tiny:build", "args": json.loads(text)}})

    assert comparable(with_args('{"a": NaN}'), with_args('{"a": NaN}')) == []
    for then, now in (("true", "1"), ("[1]", "[true]"), ('"1"', "1"), ("0", "false"), ('{"b": [1, 2]}', '{"b": [1, true]}')):
        (reason,) = comparable(with_args(f'{{"a": {then}}}'), with_args(f'{{"a": {now}}}'))
        assert reason.startswith("[model] args.a")
        was, _, is_now = reason.partition(" was ")[2].partition(" and is ")
        assert was != is_now
