"""Assertion rewriting outside of a pytest session (`_pytest.assertion`, the same in pytest 8.4 and 9)."""

from __future__ import annotations

import ast
from collections.abc import Generator, Mapping
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import _pytest.assertion as plugin
from _pytest.assertion.rewrite import AssertionRewritingHook, rewrite_asserts

INI_NAMES = ("truncation_limit_lines", "truncation_limit_chars", "assertion_text_diff_style")
"""What the explanation of a comparison looks up, where this pytest has it."""

_explaining: Generator[None, object, object] | None = None


def is_rewritten(module: ModuleType) -> bool:
    """Whether pytest rewrote the asserts of a module of this process."""
    return isinstance(getattr(module.__spec__, "loader", None), AssertionRewritingHook)


class RewritingLoader(SourceFileLoader):
    """Loads one source file with its asserts rewritten; no cache, since Python's own has the file as it is."""

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
    # pytest's own wrapper of each item, which explains for as long as it stands at its yield
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
