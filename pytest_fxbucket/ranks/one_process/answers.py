"""What each rank of a process that plays several has done: asked for and told in one job of that process."""

from __future__ import annotations

import importlib
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from pytest_fxbucket.ranks import wire

_OURS = os.path.dirname(__file__)


@dataclass(frozen=True, slots=True)
class Order:
    """Parent to process: call `function` ("package.module:function") as every rank.

    `payloads` has one packed payload a rank: each its own, or ranks would share the tensors. `log_dir` takes their output; "":
    it stays in memory.
    """

    function: str
    payloads: tuple[bytes, ...]
    log_dir: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Process to parent, for one rank; the words of `outcome` are those of a RankState. `result` is packed."""

    outcome: str
    at: float = 0.0
    error: str = ""
    error_type: str = ""
    traceback: str = ""
    stack: str = ""
    output: str = ""
    result: bytes = b""


def answer(order: Order, rank: int) -> Answer:
    """Call the function as `rank`, and say what it did."""
    try:
        function = load(order.function)
        value = function(rank, len(order.payloads), wire.unpack([order.payloads[rank]]))
    except wire.Unpicklable as error:
        return Answer("unpicklable", time.monotonic(), f"its payload cannot be read ({error})")
    except BaseException as error:  # SystemExit from a user's code is a failure like any other
        return raised(error)
    try:
        return Answer("returned", time.monotonic(), result=wire.pack_whole(value))
    except wire.Unpicklable as error:
        text = f"its result, of type {type(value).__name__}, cannot be pickled ({error})"
        return Answer("unpicklable", time.monotonic(), text)


def load(name: str) -> Callable[[int, int, object], object]:
    """The function "package.module:function"."""
    module, _, attribute = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return cast("Callable[[int, int, object], object]", found)


def raised(error: BaseException) -> Answer:
    """An answer that tells of `error`, without the frames through which a rank comes to its function."""
    trace = error.__traceback__
    while trace is not None and (
        os.path.dirname(trace.tb_frame.f_code.co_filename) == _OURS or trace.tb_frame.f_locals.get("__tracebackhide__") is True
    ):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(error.with_traceback(trace or error.__traceback__)))
    line = str(error).strip().partition("\n")[0]
    return Answer("raised", time.monotonic(), line, type(error).__name__, text)
