"""Promises put together by hand, by their own keys and by those of a plan's [bucket] and [overlap]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from pytest_fxbucket.checks.promises.expectations import Expectations
from pytest_fxbucket.plan.schema_bucket import Bucket, Overlap


def promise_by(entry_of: Mapping[str, str], own_dtype: Mapping[str, torch.dtype] | None = None, **keys: Any) -> Expectations:
    """What a plan with ``keys`` promises of parameters of ``entry_of``, in that order, float32 if nobody says otherwise."""
    plain = Expectations(
        entry_of=entry_of,
        registration=tuple(entry_of),
        own_dtype=dict.fromkeys(entry_of, torch.float32) if own_dtype is None else own_dtype,
        param_dtype=None,
        reduce_dtype=None,
        reshard_after_forward=True,
        entries=tuple(dict.fromkeys(entry_of.values())),
    )
    return changed(plain, **keys)


def changed(promise: Expectations, **keys: Any) -> Expectations:
    """``promise`` with ``keys`` of its own, of [bucket] or of [overlap]."""
    bucket, overlap, own = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for key, value in keys.items():
        table = next((made for made, of in ((bucket, Bucket), (overlap, Overlap)) if key in of.__dataclass_fields__), own)
        table[key] = value
    return replace(promise, bucket=replace(promise.bucket, **bucket), overlap=replace(promise.overlap, **overlap), **own)
