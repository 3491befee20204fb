"""Assertion rewriting outside of a pytest session (`_pytest.assertion`, as it is in pytest 8.4 and 9)."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

INI_NAMES = ("truncation_limit_lines", "truncation_limit_chars", "assertion_text_diff_style")
"""What a comparison's explanation looks up, where this pytest has it."""


class _Loader:
    """Runs code that was compiled already."""

    def __init__(self, code: CodeType) -> None:
        self.code = code

    def create_module(self, spec: object) -> None:
        """Leave it to importlib."""

    def exec_module(self, module: ModuleType) -> None:
        exec(self.code, vars(module))


def rewritten(name: str, file: Path) -> ModuleType:
    """The module `name` of `file` with its asserts rewritten, as pytest would import it; the same one until it is forgotten."""
    from _pytest.assertion.rewrite import rewrite_asserts

    module = sys.modules.get(name)
    if module is not None and isinstance(getattr(module.__spec__, "loader", None), _Loader):
        return module
    source = file.read_bytes()
    tree = ast.parse(source, filename=str(file))
    rewrite_asserts(tree, source, str(file), None)
    loader = _Loader(compile(tree, str(file), "exec", dont_inherit=True))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)  # type: ignore[arg-type]
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


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

    def getoption(self, name: str, default: Any = None) -> Any:
        return self._verbosity if name == "verbose" else default

    def get_terminal_writer(self) -> _Config:
        return self

    def _highlight(self, source: str, lexer: str = "") -> str:
        return source


@contextlib.contextmanager
def comparisons_explained(verbosity: int, ini: Mapping[str, Any]) -> Iterator[None]:
    """Let failed comparisons in rewritten asserts say how the two sides differ, as in a pytest session."""
    from _pytest.assertion import pytest_assertrepr_compare, truncate, util

    config: Any = _Config(verbosity, ini)

    def explain(op: str, left: object, right: object) -> str | None:
        try:
            lines = pytest_assertrepr_compare(config, op, left, right)
            if lines and hasattr(truncate, "materialize_with_truncation"):
                lines = truncate.materialize_with_truncation(lines, config)
        except Exception:  # an explanation is a courtesy: without it the assert still says both sides
            return None
        return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%") if lines else None

    before, util._reprcompare = util._reprcompare, explain
    try:
        yield
    finally:
        util._reprcompare = before
