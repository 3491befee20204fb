"""Errors for people: ``str(error)`` is one sentence that says what, where, and the nearest right thing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class FxbucketError(Exception):
    """Something that a user can mend; its text is shown without a traceback."""


class UsageError(FxbucketError):
    """An option or argument that cannot be used as given; pytest exits 4."""


class PlanError(FxbucketError):
    """A plan file, table, key or entry that is wrong."""


class CaptureError(FxbucketError):
    """A model or a step that cannot be traced as the plan asks."""


class StageError(FxbucketError):
    """Cuts that do not part a model into stages, a call that the stages are not of, or ranks that a schedule does not fit."""


class PassError(FxbucketError):
    """A graph that a pass cannot bucket safely, or a pass that broke."""


class RankError(FxbucketError):
    """Ranks that failed, died, or did not answer in time."""


class GoldenError(FxbucketError):
    """A golden file that is missing, damaged, or of another version."""


class BenchmarkError(FxbucketError):
    """Step times that cannot be taken, stored, read back, compared or shown."""


class SimulationError(FxbucketError):
    """A cluster or a cost model that a step cannot be simulated with."""


class GraphError(FxbucketError):
    """A question about a graph that has no answer."""


class NoModuleError(GraphError):
    """A module that a graph does not have; also a KeyError, an AttributeError or an IndexError, as it was asked for."""


def text_of(error: BaseException) -> str:
    """The text of ``error`` in one line, or a note that it cannot give one."""
    try:
        return " ".join(str(error).split())
    except Exception as another:
        return f"no text, since its __str__ raised {type(another).__name__}"


def named(error: BaseException) -> str:
    """Type and text of ``error``."""
    return f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")


def without_our_frames(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function`` for users' tests: of an error for people pytest shows its sentence and the test's own line, and no more."""

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except FxbucketError as error:
            raise error.with_traceback(None) from None

    return called
