"""Runs in the ranks: the body of one test."""

from __future__ import annotations

import bdb
import importlib
import sys
import threading
import traceback
import unittest
import warnings
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import pytest

from pytest_fxbucket.pytest_plugin.distributed_test.modules import Finder, ModuleOrigin, on_rank
from pytest_fxbucket.pytest_plugin.pytest_internals import explain_comparisons, filter_warnings
from pytest_fxbucket.ranks import wire
from pytest_fxbucket.ranks.wire import cut

Filters = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
Kind = Literal["passed", "failed", "skipped", "xfailed"]

_finder = Finder()
_returned: type[Warning] = getattr(pytest, "PytestReturnNotNoneWarning", pytest.PytestWarning)  # pytest 8.4.0 has none
_xfail = pytest.xfail  # kept here, since ``run`` replaces it


class NoTerminal(Exception):
    """A debugger was started on a rank."""


@dataclass(frozen=True, slots=True)
class TestBody:
    """What a rank needs to run a test's body as pytest was asked to."""

    module: str
    names: tuple[str, ...]
    """from the module on: a function, or classes and a method"""
    origins: Mapping[str, ModuleOrigin]
    sys_path: tuple[str, ...]
    packed: bytes
    """Fixtures and parameters by name, and the attributes that set-up gave to the test's instance, packed.

    Packed by themselves, since they may be instances of classes in the test's own module: to unpack them imports that module,
    and ``origins`` must be known before.
    """
    mesh: Mapping[str, int]
    """size of each mesh dimension by name"""
    verbosity: int
    """of assertions, as pytest was asked for"""
    ini: Mapping[str, Any]
    """ini values that the explanation of a comparison looks up"""
    warning_filters: Filters
    """of the ini file, the command line, and the test's marks"""
    runs_xfail: bool
    """--runxfail"""


@dataclass(frozen=True, slots=True)
class BodyEnding:
    """How the body ended on one rank, if not by an error."""

    kind: Kind
    reason: str = ""


def run(rank: int, world: int, body: TestBody) -> BodyEnding:
    """Run the body; an assertion or any other error is the job's."""
    __tracebackhide__ = True
    # A rank serves many tests, so each body sets anew what the one before may have left: path, known modules, pytest.xfail.
    sys.path[:] = body.sys_path
    _finder.tell(body.origins)
    module = importlib.import_module(body.module)
    values, state = cast("tuple[dict[str, Any], dict[str, Any]]", wire.unpack([body.packed]))
    arguments, own = ({name: on_rank(one, rank, body.mesh) for name, one in given.items()} for given in (values, state))
    function = _function(module, body.names, own)
    explain_comparisons(body.verbosity, body.ini)
    setattr(pytest, "xfail", _not_at_all if body.runs_xfail else _xfail)  # noqa: B010
    try:
        with warnings.catch_warnings():
            filter_warnings(*body.warning_filters)
            with _nothing_unheard():
                result = function(**arguments)
            return _of_result(result)
    except (pytest.skip.Exception, unittest.SkipTest) as skip:
        return BodyEnding("skipped", cut(str(skip)))
    except _xfail.Exception as xfail:
        return BodyEnding("xfailed", cut(str(xfail)))
    except bdb.BdbQuit as quit:
        text = "a debugger was started on a rank, where there is no terminal; print instead, or run the body without the marker"
        raise NoTerminal(text).with_traceback(quit.__traceback__) from None


@contextmanager
def _nothing_unheard() -> Iterator[None]:
    """Warn of what was raised where nobody catches it, as pytest does: in a thread, or where Python itself calls."""
    heard: list[pytest.PytestWarning] = []

    def in_thread(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "unknown"
        text = f"Exception in thread {name}\n\n{_shown(args.exc_value)}"
        heard.append(pytest.PytestUnhandledThreadExceptionWarning(text))

    def unraisable(args: sys.UnraisableHookArgs) -> None:
        text = f"{args.err_msg or 'Exception ignored in'}: {args.object!r}\n\n{_shown(args.exc_value)}"
        heard.append(pytest.PytestUnraisableExceptionWarning(text))

    before = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = in_thread, unraisable
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = before
    for warning in heard:
        warnings.warn(warning, stacklevel=1)


def _shown(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error)) if error is not None else ""


def _function(found: Any, names: tuple[str, ...], state: dict[str, Any]) -> Any:
    for name in names[:-1]:
        found = getattr(found, name)
    if len(names) > 1:
        # Set-up has run in pytest's process and not here: the instance gets what it left there.
        found = found()
        vars(found).update(state)
    return getattr(found, names[-1])


def _of_result(result: object) -> BodyEnding:
    """How a body ended that gave ``result``: if that is to be awaited, nothing of the body has run."""
    kind = type(result).__name__
    if not (hasattr(result, "__await__") or hasattr(result, "__aiter__")):
        if result is not None:
            text = f"a test gives None, this one gave a {kind}: was assert meant, where return is written?"
            warnings.warn(_returned(text), stacklevel=1)
        return BodyEnding("passed")
    if isinstance(result, Coroutine):
        result.close()
    return BodyEnding("failed", f"the test gave a {kind}, which nobody awaits; let a plain function call asyncio.run")


def _not_at_all(*_: object, **__: object) -> None:
    """Takes the place of pytest.xfail under --runxfail, as it does in pytest's own process."""


_not_at_all.Exception = _xfail.Exception  # type: ignore[attr-defined]  # as pytest marks its own
