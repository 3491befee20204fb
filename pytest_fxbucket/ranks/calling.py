"""What each rank does for a job: find its function, and put into words what it raised."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from pytest_fxbucket.ranks.words import cut, line_of

_OURS = frozenset({os.path.dirname(__file__), os.path.join(os.path.dirname(__file__), "one_process")})


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception in words: the first line of its message, its class's name, and its traceback from the job on."""

    error: str
    error_type: str
    traceback: str


def load(name: str) -> Callable[[int, int, object], object]:
    """The function "package.module:function"."""
    module, _, attribute = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return cast("Callable[[int, int, object], object]", found)


def raised(error: BaseException) -> Raised:
    """`error` in words, whatever it makes of being asked for them."""
    line = line_of(error)
    try:
        text = "".join(traceback.format_exception(_without_our_frames(error)))
    except BaseException as second:
        text = f"{type(error).__name__}: {line} (its traceback cannot be shown: {type(second).__name__})\n"
    return Raised(line, type(error).__name__, cut(text))


def _without_our_frames(error: BaseException) -> BaseException:
    """From the job on; what a job puts around a user's function hides itself, as pytest's own frames do."""
    trace = error.__traceback__
    while trace is not None and (
        os.path.dirname(trace.tb_frame.f_code.co_filename) in _OURS or trace.tb_frame.f_locals.get("__tracebackhide__") is True
    ):
        trace = trace.tb_next
    return error.with_traceback(trace) if trace is not None else error
