"""Layers traced once and repeated: the graph of a deep model from traces of a few of its layers, or the full trace.

A run of layers that are built alike is made short, traced twice (with five units and with six), and the middle one is repeated.
That the graph is the one that the full trace would give is not taken on trust:

- layers are alike in classes, parameters, buffers, hooks, and in all attributes that their forward reads;
- at full depth each is called once, in order, with the output of the one before and what all share (:mod:`repeat_calls`);
- forward leaves no Python state changed, which could make a later layer another one;
- the five units, repeated to six, are the trace of six: operators, arguments, metadata, fake values, storages and names.

Whatever does not hold is a reason to trace everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.capture.pictures import state_of
from pytest_fxbucket.capture.repeat.calls import Calls, calls_of, refuse_irregular
from pytest_fxbucket.capture.repeat.confirm import refuse_other
from pytest_fxbucket.capture.repeat.errors import NotAlike
from pytest_fxbucket.capture.repeat.layers import (
    Run,
    Treatment,
    differing,
    longest_run,
    reads_refused,
    refuse_shared,
    shortened,
)
from pytest_fxbucket.capture.repeat.names import Names
from pytest_fxbucket.capture.repeat.stamp import Stamp
from pytest_fxbucket.capture.repeat.template import Template, Traced

if TYPE_CHECKING:
    from torch import nn

Trace = Callable[["nn.Module"], Traced]
Forward = Callable[["nn.Module"], object]

UNITS = 5
"""Units of the shorter trace: the two at the ends, and three between them that must be alike."""
PERIODS = (1, 2, 3, 4)
"""Every layer alike; every second, as with two kinds of attention in turn; and so on."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A trace, and how it came about."""

    traced: Traced
    repeated: str
    """The layers that were repeated, as ``layers[0-125]``; empty if all were traced."""
    reason: str
    """Why all were traced, as one clause; empty if layers were repeated."""


def trace_repeated(model: nn.Module, trace: Trace, forward: Forward, treatment: Treatment | None = None) -> Captured:
    """``trace(model)``, or what is equal to it, at the cost of some layers instead of all.

    ``trace`` traces the model that it is given, as it is then. ``forward`` calls model and loss on fake tensors, under their
    fake mode, untraced. ``treatment`` says what the plan does to a module, by FQN. Raises what ``trace`` raises.
    """
    reasons = []
    for period in PERIODS:
        try:
            run, traced = repeat_layers(model, trace, forward, period, treatment)
        except NotAlike as error:
            reasons.append(str(error))
        else:
            return Captured(traced, str(run), "")
    return Captured(trace(model), "", reasons[0])


def repeat_layers(
    model: nn.Module, trace: Trace, forward: Forward, period: int = 1, treatment: Treatment | None = None
) -> tuple[Run, Traced]:
    """The longest run of layers that are alike, in units of ``period``, and the trace of ``model`` from fewer of them.

    Raises :class:`NotAlike` if there is none that pays, or it cannot be shown that the graph is that of the full trace.
    """
    run = longest_run(model, period, treatment)
    if run.units <= UNITS + 1:
        raise NotAlike(f"{run} has {run.units} units that are alike, and {2 * UNITS + 1} would be traced")
    refuse_shared(model, run)
    before = state_of(model)
    with reads_refused(model, run, differing(model, run)):
        full, short = _calls(model, run, forward)
    _refuse_changes(before, state_of(model))
    refuse_irregular(full, short)
    with reads_refused(model, run, differing(model, run)):
        small, large = (_traced_with(model, run, units, trace) for units in (UNITS, UNITS + 1))
    _refuse_changes(before, state_of(model))
    names = Names(small, large)
    refuse_other(Stamp(small, UNITS + 1, names.for_units(UNITS + 1)).traced(), large.traced)
    traced = Stamp(small, run.units, names.for_units(run.units)).traced()
    _refuse_other_parameters(model, traced)
    return run, traced


def _calls(model: nn.Module, run: Run, forward: Forward) -> tuple[Calls, Calls]:
    """All units called, and as many as are traced."""
    with _or_not_alike(f"calling the model with all of {run}"):
        full = calls_of(model, run, forward)
    with shortened(model, run, UNITS), _or_not_alike(f"calling the model with {UNITS} units of {run}"):
        short = calls_of(model, run.with_units(UNITS), forward)
    return full, short


def _traced_with(model: nn.Module, run: Run, units: int, trace: Trace) -> Template:
    with shortened(model, run, units), _or_not_alike(f"tracing {units} units of {run}"):
        traced = trace(model)
    return Template(traced, run.with_units(units))


@contextmanager
def _or_not_alike(doing: str) -> Iterator[None]:
    """Whatever the block raises is a reason to trace everything: the full trace says better what is wrong, if anything is."""
    try:
        yield
    except NotAlike:
        raise
    except Exception as error:
        raise NotAlike(f"{doing} failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def _refuse_changes(before: dict[str, object], after: dict[str, object]) -> None:
    for where in [*before, *(where for where in after if where not in before)]:
        if before.get(where) != after.get(where):
            raise NotAlike(f"forward changes {where}")


def _refuse_other_parameters(model: nn.Module, traced: Traced) -> None:
    for role, held in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
        if [fqn for fqn, _ in held] != [value.fqn for value in traced.inputs if value.role == role]:
            raise NotAlike(f"the inputs of role {role} do not repeat in their order")
