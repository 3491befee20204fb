"""The entries of a plan's ``[bucket]`` on one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_fxbucket.plan.agree import agree_with_entries
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.selector import Resolution, resolve


def entries_of(plan: Plan, parameters: Sequence[str], modules: Sequence[str], aliases: Mapping[str, str]) -> Resolution:
    """What the entries of ``plan`` mean; none by size. Raises PlanError for entries that match nothing or overlap."""
    bucket = plan.bucket
    if bucket.by == "size":
        return Resolution((), (), ())
    where = f"{plan.path}: [bucket]"
    found = resolve(bucket.plan, parameters, modules, aliases=aliases, unplanned=bucket.unplanned, where=where)
    agree_with_entries(plan, [entry.name for entry in found.entries], str(plan.path))
    return found
