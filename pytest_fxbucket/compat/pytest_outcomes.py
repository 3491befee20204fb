"""What a test's marks make of its outcome (`_pytest.skipping`, `_pytest.config`, the same in pytest 8.4 and 9)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from _pytest.config import apply_warning_filters, parse_warning_filter
from _pytest.skipping import xfailed_key


def expected_failure(item: pytest.Item) -> tuple[str, tuple[type[BaseException], ...]] | None:
    """Reason and exceptions of the mark `xfail(raises=...)` that holds for an item under way; None without."""
    xfailed = item.stash.get(xfailed_key, None)
    if xfailed is None or item.config.option.runxfail:
        return None
    raises: Any = xfailed.raises if isinstance(xfailed.raises, tuple) else (xfailed.raises,)
    kinds = tuple(_kinds(raises))
    return (xfailed.reason, kinds) if kinds else None


def _kinds(raises: Sequence[Any]) -> Iterator[type[BaseException]]:
    for one in raises:
        yield from (one,) if isinstance(one, type) else getattr(one, "expected_exceptions", None) or ()


def warning_filters(item: pytest.Item) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The filters of the ini file, of the command line, and of the item's marks, as texts."""
    marked = (arg for mark in item.iter_markers("filterwarnings") for arg in mark.args)
    return (
        tuple(item.config.getini("filterwarnings")),
        tuple(item.config.known_args_namespace.pythonwarnings or ()),
        tuple(marked),
    )


def filter_warnings(ini: Sequence[str], command_line: Sequence[str], marked: Sequence[str]) -> None:
    """Add these filters to Python's, in pytest's order."""
    apply_warning_filters(ini, command_line)
    for text in marked:
        warnings.filterwarnings(*parse_warning_filter(text, escape=False))
