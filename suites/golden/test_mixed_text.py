"""A bucket of several dtypes in a golden: each member says its own, and a change of it is told in words."""

from __future__ import annotations

from dataclasses import replace

import torch

from pytest_fxbucket.golden.mismatch import changes
from pytest_fxbucket.golden.schedule import schedule_of
from pytest_fxbucket.golden.text import golden_text
from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis, Member

F32, BF16, BYTE = torch.float32, torch.bfloat16, torch.uint8
MIXED = Bucket(
    kind="all_gather",
    op="",
    group="0",
    dtype=BYTE,
    numel=32,
    bytes=32,
    parts=2,
    members=(Member("a.w", 0, 2, 23, F32), Member("a.b", 8, 4, 7, BF16)),
    direction="forward",
    launch=0,
    wait=1,
    first_use=2,
    backward_use=None,
    node="launch",
)


def text(bucket: Bucket) -> str:
    schedule = schedule_of(GraphAnalysis((bucket,), (), (), 9), {"a.w": "a", "a.b": "a"}, {"0": "dp"})
    return golden_text("", [], {"joint": schedule})


def test_each_member_of_a_bucket_of_several_dtypes_says_its_own() -> None:
    assert text(MIXED).splitlines()[-4:] == [
        "  a",
        "    forward all_gather: 2 members, mixed as uint8, 32 bytes, dp",
        "      a.w 2 float32",
        "      a.b 4 bfloat16",
    ]


def test_members_of_one_dtype_say_it_once() -> None:
    plain = replace(MIXED, dtype=F32, members=(MIXED.members[0],), numel=4, bytes=16)
    assert text(plain).splitlines()[-2:] == ["    forward all_gather: 1 member, float32, 16 bytes, dp", "      a.w 2"]


def test_bytes_that_carry_nothing_are_padding() -> None:
    apart = replace(MIXED, members=(MIXED.members[0], replace(MIXED.members[1], offset=12)), bytes=48)
    assert text(apart).splitlines()[-5:] == [
        "    forward all_gather: 2 members, mixed as uint8, 48 bytes, dp",
        "      a.w 2 float32",
        "      (padding) 4 bytes",
        "      a.b 4 bfloat16",
        "      (padding) 4 bytes",
    ]


def test_a_member_that_changes_its_dtype_is_told_in_words() -> None:
    narrow = replace(MIXED, members=(MIXED.members[0], replace(MIXED.members[1], dtype=torch.float16)))
    assert changes(text(MIXED), text(narrow)) == ["a.b of forward all_gather a changed: 4 bfloat16 -> 4 float16 elements"]
    second, first = replace(MIXED.members[1], offset=0), replace(MIXED.members[0], offset=8)
    assert changes(text(MIXED), text(replace(MIXED, members=(second, first)))) == [
        "byte layout of forward all_gather a changed: a.b stands where a.w stood"
    ]
