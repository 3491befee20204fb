"""Plan files: their schema, how they are read, and the language that names parameters. Imports no torch."""

from __future__ import annotations

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.entries import Entry
from pytest_fxbucket.plan.load import load_plans, parse_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.selectors import Resolution, ResolvedEntry, parse_entries, resolve

__all__ = [
    "Entry",
    "Plan",
    "PlanError",
    "Resolution",
    "ResolvedEntry",
    "load_plans",
    "parse_entries",
    "parse_plans",
    "resolve",
]
