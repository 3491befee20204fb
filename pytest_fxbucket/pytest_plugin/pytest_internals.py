"""Private parts of pytest, the same in 8.4 and 9: what marks make of an outcome, assertion rewriting, the terminal reporter."""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import _pytest.assertion as plugin
import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook, rewrite_asserts
from _pytest.config import apply_warning_filters, create_terminal_writer, parse_warning_filter
from _pytest.skipping import xfailed_key

from pytest_fxbucket.ranks.wire import class_name


def expected_failure(item: pytest.Item, error: str, classes: Sequence[str]) -> str | None:
    """The reason of the mark ``xfail(raises=...)`` of an item that runs now, if it expects what a rank raised; else None.

    ``error`` is what that says, and ``classes`` its own class and all that it is derived from, as "module.name".
    """
    xfailed = item.stash.get(xfailed_key, None)
    if xfailed is None or item.config.option.runxfail:
        return None
    raises: Any = xfailed.raises if isinstance(xfailed.raises, tuple) else (xfailed.raises,)
    is_expected = any(class_name(kind) in classes for kind in _kinds(raises, error))
    return str(xfailed.reason) if is_expected else None


def tell_by_text(item: pytest.Item) -> None:
    """Let ``--lf`` and its like, which keep failures as texts of node ids, find ``item``, whose name may end in brackets."""
    # From pytest 9.2 on an id has parts, and one that is read from the cache has what stands in brackets as a part of its own.
    known = getattr(item, "_id", None)
    if known is not None:
        item._id = type(known).parse(item.nodeid)


def expect_no_other_failure(item: pytest.Item) -> None:
    """Let an item with the mark ``xfail(raises=...)`` that runs now fail by whatever is raised."""
    xfailed = item.stash.get(xfailed_key, None)
    if xfailed is not None and xfailed.raises is not None:
        item.stash[xfailed_key] = replace(xfailed, raises=())


def _kinds(raises: Sequence[Any], error: str) -> Iterator[type[BaseException]]:
    for one in raises:
        if isinstance(one, type):
            yield one
            continue
        # Since pytest 8.4 ``raises`` may have a RaisesExc. A check of its own cannot be asked: the exception is on a rank.
        match = getattr(one, "match", None)
        if getattr(one, "check", None) is None and (match is None or re.search(match, error)):
            yield from getattr(one, "expected_exceptions", None) or ()


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


# Assertion rewriting outside of a pytest session (``_pytest.assertion``, the same in pytest 8.4 and 9).


INI_NAMES = ("truncation_limit_lines", "truncation_limit_chars", "assertion_text_diff_style")
"""What the explanation of a comparison looks up, where this pytest has it."""

_explaining: Generator[None, object, object] | None = None


def is_rewritten(module: ModuleType) -> bool:
    """Whether pytest rewrote the asserts of a module of this process."""
    return isinstance(getattr(module.__spec__, "loader", None), AssertionRewritingHook)


class RewritingLoader(SourceFileLoader):
    """Loads one source file with its asserts rewritten, without a cache: Python's own has them not rewritten."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the file as it is now."""
        path = self.get_filename(fullname)
        source = self.get_data(path)
        tree = ast.parse(source, filename=path)
        rewrite_asserts(tree, source, path)
        return compile(tree, path, "exec", dont_inherit=True)


def explain_comparisons(verbosity: int, ini: Mapping[str, Any]) -> None:
    """From now on failed comparisons in rewritten asserts say how the two sides differ, as within pytest's own process."""
    global _explaining
    if _explaining is not None:
        _explaining.close()
    config = _Config(verbosity, ini)

    def compared(config: Any, op: str, left: object, right: object) -> list[list[str] | None]:
        try:
            return [plugin.pytest_assertrepr_compare(config, op, left, right)]
        except Exception:  # an explanation is a courtesy: without it the assert still says both sides
            return []

    hooks = SimpleNamespace(pytest_assertrepr_compare=compared, pytest_assertion_pass=SimpleNamespace(get_hookimpls=lambda: ()))
    # The hook wrapper by which pytest explains comparisons of one item. It is run to its yield and left there: explanations are
    # on until it is closed, which a later call of this function does.
    item: Any = SimpleNamespace(config=config, ihook=hooks)
    _explaining = plugin.pytest_runtest_protocol(item)
    next(_explaining)


class _Config:
    """As much of pytest's Config as the explanation of a comparison asks for."""

    def __init__(self, verbosity: int, ini: Mapping[str, Any]) -> None:
        self._verbosity, self._ini = verbosity, ini
        self.pluginmanager = self

    def has_plugin(self, name: str) -> bool:
        return False

    def get_verbosity(self, kind: str | None = None) -> int:
        return self._verbosity

    def getini(self, name: str) -> Any:
        return self._ini.get(name)

    def getvalue(self, name: str) -> str:
        return {"assertmode": "rewrite"}[name]

    def get_terminal_writer(self) -> _Config:
        return self

    def _highlight(self, source: str, lexer: str = "") -> str:
        return source


# Run on pytest 9.2 only; create_terminal_writer and TerminalReporter._tw are as old as pytest 5.4.


def silence(config: pytest.Config) -> None:
    """Let nothing be printed by the reporter from now on, if there is one."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter._tw = create_terminal_writer(config, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
