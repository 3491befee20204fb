"""Between machines go data and no code."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pytest_fxbucket.pytest_plugin.distributed_test.job import BodyEnding
from pytest_fxbucket.pytest_plugin.torchrun import AgreedOutcome
from pytest_fxbucket.ranks.failure import RankState
from pytest_fxbucket.ranks.flight_recorder import RankPosition, RecordedGroup, RecordedLaunch
from pytest_fxbucket.ranks.torchrun import store


def there_and_back(value):
    return store.unpack([bytearray(buffer) for buffer in store.pack(value)])


LAUNCH = RecordedLaunch(1, 0, 5, True, "all_reduce", "float32", 3)
VALUES = [
    None,
    [True, 1, -1.5, "text \udcff é", math.inf, 1 << 200],
    (1, (2, [3, ()])),
    {1: "a", (2, "b"): [b"bytes", {}], None: {4, 5}, frozenset({1}): bytes(9)},
    ["list", ["tuple"], {"dict": "ours"}],
    BodyEnding("skipped", "no reason"),
    AgreedOutcome("failed", "text", True, ""),
    RankState(
        2, "died", math.inf, where=RankPosition("m", LAUNCH, "waits for", (RecordedGroup((0, 1), 2, 3),), (LAUNCH, LAUNCH))
    ),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_plain_data_and_words_of_ours_come_back_equal(value):
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str)
def test_tensors_come_back_bit_for_bit(dtype):
    tensor = torch.randint(0, 2, (3, 5)).to(dtype)
    for value in (tensor, tensor.t(), tensor[:, ::2], tensor[0, 0], tensor[:0]):
        back = there_and_back({"a": [value]})["a"][0]
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert torch.equal(back.contiguous().view(-1).view(torch.uint8), value.contiguous().view(-1).view(torch.uint8))
    parameter = there_and_back(torch.nn.Parameter(torch.ones(2)))
    assert type(parameter) is torch.nn.Parameter


@dataclass
class Theirs:
    value: int


class Text(str):
    pass


def within_itself():
    found = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([Theirs(1)], r"a .*test_plain\.Theirs"),
        ({"a": lambda: None}, r"a builtins\.function"),
        (Text("a"), r"a .*test_plain\.Text"),
        (torch.ones(3).to_sparse(), r"a torch\.Tensor"),
        (within_itself(), "recursion"),
        ([1 << 100_000], "digits"),
    ],
)
def test_what_is_not_plain_is_named_before_it_is_sent(value, said):
    with pytest.raises(store.NotPlainDataError, match=said):
        store.pack(value)


class Harm:
    def __reduce__(self):
        return Path.touch, (Path("harmed"),)


CODE = {
    "a pickle": [pickle.dumps(Harm())],
    "a class of another package": [json.dumps(["ours", "subprocess:Popen", "touch harmed"]).encode()],
    "another package by way of ours": [json.dumps(["ours", "pytest_fxbucket.ranks.launch:subprocess.Popen", "x"]).encode()],
    "a function of ours": [json.dumps(["ours", "pytest_fxbucket.ranks.wire:unpack", []]).encode()],
    "a dataclass with too few fields": [
        json.dumps(["ours", "pytest_fxbucket.pytest_plugin.distributed_test.job:BodyEnding"]).encode()
    ],
    "a tensor larger than its bytes": [json.dumps(["tensor", 0, "float32", [1 << 40], [1], False, False]).encode(), b""],
    "a tensor beside its bytes": [json.dumps(["tensor", 0, "float32", [1], [1], False, False]).encode()],
    "a view of more than its bytes": [json.dumps(["tensor", 0, "uint8", [2, 2], [1000, 1], False, False]).encode(), b"1234"],
    "no dtype": [json.dumps(["tensor", 0, "nn", [1], [1], False, False]).encode(), b"1234"],
    "an unknown kind": [b'["code", "x"]'],
    "an object": [b'{"a": 1}'],
    "depth": [b"[" * 100_000],
    "nothing": [b""],
}


@pytest.mark.parametrize("name", CODE)
def test_what_is_not_plain_is_refused_in_one_sentence_and_does_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        store.RefusedDataError, match="what came over the network is no plain data of ours, and was refused"
    ) as caught:
        store.unpack(CODE[name])
    assert "\n" not in str(caught.value)
    assert not Path("harmed").exists()
