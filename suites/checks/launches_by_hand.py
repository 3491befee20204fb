"""Launches and promises made by hand: two entries, a gather of each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pytest_fxbucket.checks.promises.expectations import Expectations
from pytest_fxbucket.graph.buckets import Bucket, Member
from suites.checks.promising import promise_by

F32, BF16 = torch.float32, torch.bfloat16
ENTRIES = {"a": ("a.u", "a.v", "a.w"), "b": ("b.u", "b.v")}
ENTRY_OF = {fqn: entry for entry, fqns in ENTRIES.items() for fqn in fqns}


def promise(entry_of: Mapping[str, str] = ENTRY_OF, **keys: Any) -> Expectations:
    """What a plan of these entries promises if it says no more than ``keys``."""
    return promise_by(entry_of, **keys)


def gather(fqn: str, place: int, size: int = 256, **change: Any) -> Bucket:
    """A gather of ``fqn``, ``size`` bytes in all, on two ranks; its node is named as it is."""
    dtype = change.get("dtype", F32)
    plain: dict[str, Any] = {
        "kind": "all_gather",
        "op": "",
        "group": "0",
        "dtype": dtype,
        "numel": size // dtype.itemsize,
        "bytes": size,
        "parts": 2,
        "members": (Member(fqn, 0, size // 2 // dtype.itemsize, 23, dtype),),
        "direction": "forward",
        "launch": 10 * place,
        "wait": 10 * place + 1,
        "first_use": 10 * place + 2,
        "backward_use": None,
        "node": fqn,
    }
    return Bucket(**{**plain, **change})
