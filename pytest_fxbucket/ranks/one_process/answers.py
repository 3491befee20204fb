"""What each rank of a process that plays several has done: asked for and told in one job of that process."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pytest_fxbucket.ranks import calling, twin, wire


@dataclass(frozen=True, slots=True)
class Order:
    """Parent to process: call `function` ("package.module:function") as every rank.

    `payloads` has one packed payload a rank: each its own, or ranks would share the tensors.
    """

    function: str
    payloads: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Process to parent, for one rank; the words of `outcome` are those of a RankState. `result` is packed."""

    outcome: str
    at: float = 0.0
    error: str = ""
    error_type: str = ""
    traceback: str = ""
    stack: str = ""
    result: bytes = b""


def answer(order: Order, rank: int) -> Answer:
    """Call the function as `rank`, and say what it did."""
    told = _called(order, rank)
    if twin.is_twin():
        twin.end(rank, told.outcome, told.error_type, told.error, told.traceback)
    return told


def raised(error: BaseException) -> Answer:
    """An answer that tells of `error`, without the frames through which a rank comes to its function."""
    told = calling.raised(error)
    return Answer("raised", time.monotonic(), told.error, told.error_type, told.traceback)


def _called(order: Order, rank: int) -> Answer:
    try:
        function = calling.load(order.function)
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
