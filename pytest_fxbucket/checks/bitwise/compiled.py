"""Running both graphs of a step compiled; and the order of launches and waits in the code that a compiler wrote."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.graph.collectives import is_wait, launch_kind
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.step_runner import OneGraph
from pytest_fxbucket.words import counted

if TYPE_CHECKING:
    import torch
    from torch import fx

    from pytest_fxbucket.compat.compilers import Compiled
    from pytest_fxbucket.step_runner import StepTask

WAIT = "wait_tensor"
_CALL = re.compile(r"^\s*(?:\w+ = )?torch\.ops\._c10d_functional\.(\w+)", re.MULTILINE)


class CompiledGraph(OneGraph):
    """A step as one graph that ``compiler`` compiles when it is first run; while single nodes are watched, it runs as it is."""

    def __init__(self, graph: fx.GraphModule, state: list[torch.Tensor], task: StepTask, name: str, compiler: str) -> None:
        super().__init__(graph, state, task, name)
        self.compiler = compiler
        self._compiled: Compiled | None = None
        self.emitted: tuple[str, ...] = ()
        """Launches and waits in the order of the code that the compiler wrote; empty for a compiler that writes none."""

    def call(self, name: str, graph: fx.GraphModule, *given: torch.Tensor) -> list[Any]:
        """Results of ``graph``, compiled."""
        if self.watch is not None:
            return super().call(name, graph, *given)
        if self._compiled is None:
            from pytest_fxbucket.compat.compilers import as_whole

            self._compiled, code = as_whole(graph, given, self.compiler)
            self.emitted = launches_in(code)
        return list(self._compiled(*given))


def launches_in(code: Sequence[str]) -> tuple[str, ...]:
    """Operators of the launches and waits that inductor's wrappers call, in order; in-place forms have the plain name."""
    return tuple(name.removesuffix("_") for text in code for name in _CALL.findall(text))


def launches_of(graph: fx.Graph) -> tuple[str, ...]:
    """Operators of a graph's launches and waits, in order, named as :func:`launches_in` names them."""
    names = ((node, operator_name(node).partition("::")[2]) for node in graph.nodes)
    return tuple(name.removesuffix("_") for node, name in names if is_wait(node) or launch_kind(node) is not None)


def other_launches(emitted: Sequence[str], graph: Sequence[str]) -> str:
    """A clause on the first operator that is called more or less often than in the graph; empty if none is."""
    for name in sorted({*emitted, *graph}):
        have, expected = emitted.count(name), graph.count(name)
        if have != expected:
            return f"it calls {name} {have} times, the graph {expected}"
    return ""


def launched_later(emitted: Sequence[str], graph: Sequence[str]) -> str:
    """A clause on the first wait with fewer launches before it than in the graph; empty if there is none.

    More launches before a wait are no loss: a launch that comes earlier hides no less.
    """
    have, expected = _before_waits(emitted), _before_waits(graph)
    for number, (now, was) in enumerate(zip(have, expected, strict=False), 1):
        if now < was:
            return f"before wait {number} of {len(expected)} it has {counted(now, 'launch')}, the graph {was}"
    return ""


def _before_waits(names: Sequence[str]) -> list[int]:
    waits = [at for at, name in enumerate(names) if name == WAIT]
    # All that stands before wait ``number`` is launches, but for the waits before it.
    return [at - number for number, at in enumerate(waits)]
