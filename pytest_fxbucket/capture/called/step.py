"""A training step that is called like the function it was captured from, and runs as a graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.capture.called.around import around_of, refuse_changed
from pytest_fxbucket.capture.called.crossing import Crossing, iterating_of
from pytest_fxbucket.capture.called.live import Live
from pytest_fxbucket.capture.called.sharing import refuse_shared_writes
from pytest_fxbucket.capture.called.signature import Arguments, shared_memory, signature
from pytest_fxbucket.capture.called.state import Making
from pytest_fxbucket.capture.called.trace import Traced, trace_call
from pytest_fxbucket.capture.called.transforming import Transformed, described, transformed
from pytest_fxbucket.capture.called.values import Values
from pytest_fxbucket.capture.override.overrides import overrides_given
from pytest_fxbucket.capture.roles import StepGraph
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.iterating import Iterating
from pytest_fxbucket.transforms.traits import traits_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from pytest_fxbucket.capture.override.overrides import Overrides
    from pytest_fxbucket.transforms.running import Transform


def capture_step(
    function: Callable[..., Any],
    *,
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    transforms: Sequence[Transform] = (),
    overrides: Mapping[str | type[nn.Module], Any] = {},
) -> CapturedStep:
    """A training step that runs as a graph, and is called like ``function``.

    ``function(*args, **kwargs)`` is an eager step that uses ``model`` and ``optimizers``: forward, backward, clipping,
    ``step()``, ``zero_grad()``, in its own order, for one batch or several. It is called only to be traced, on fake tensors,
    once for each new signature. Arguments and results are tensors, plain values, and containers of them; tensors that it gives
    have no autograd graph. ``transforms`` each get the traced :class:`StepGraph` (graph "joint") and its state by name, and
    give a step that fits; they run once a trace. ``overrides`` has modules that are not traced, by FQN or class, each with
    "call" (the real module is called when the graph runs), a ``callable(module)`` that gives a sub-graph, asked here and once
    for each module, or an :class:`pytest_fxbucket.capture.Override`. Raises :class:`CaptureError` for what is no model, no
    optimizer or no override.
    """
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(f"model is a value of type {type(model).__name__}, expected a torch.nn.Module")
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for optimizer in given:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise CaptureError(f"optimizers has a value of type {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    return CapturedStep(function, model, given, tuple(transforms), overrides_given(model, overrides))


@dataclass(frozen=True)
class _Entry:
    """One traced graph, and what it is good for."""

    traced: Traced
    step: StepGraph
    iterating: Iterating | None
    """The graphs of a step whose work crosses iterations."""

    def fits(self, live: Live) -> bool:
        """Whether the gradients that are there now are those that it was traced with, where it matters."""
        return all((live.params[fqn].grad is not None) == there for fqn, there in self.traced.gradients.items())


class CapturedStep:
    """What :func:`capture_step` gives.

    A call writes new values into the model's own parameters and buffers and the optimizers' own state, so that both
    ``state_dict()`` are right after each; between calls they may be changed and loaded. Learning rates are read at each call.
    What a graph has baked in (shapes, dtypes, plain arguments, attributes and hooks of modules, variables that the function
    reads, other numbers of a parameter group) makes the signature: a new one is traced, an old one never again. If a call
    fails, model and optimizers are as they were.

    If a transform moves work into the next call, parameters, state and gradients of what moved are one call behind, and so is
    ``state_dict()``: a call with ``last_step=True`` finishes them, and the one after it begins anew. A call with a new
    signature finishes what the last one left first. Between calls nothing of what moved may be changed or loaded.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        transforms: Sequence[Transform],
        overrides: Overrides,
    ) -> None:
        self._function, self._model, self._optimizers, self._transforms = function, model, optimizers, transforms
        self._overrides = overrides
        self._subgraphs = [one.subgraph.forward for one in overrides.of.values() if one.subgraph is not None]
        self._crossing = Crossing() if any(traits_of(one).crosses_iterations for one in transforms) else None
        self._entries: dict[Hashable, list[_Entry]] = {}
        self._removed: dict[str, torch.Tensor] = {}
        self.state: dict[str, torch.Tensor] = {fqn: first.clone() for fqn, first in overrides.first_state.items()}
        """State that transforms and overrides added, by name; shared by all signatures. Save and load it with the model."""
        self._added: set[str] = set(self.state)

    @property
    def traces(self) -> int:
        """How often the function was traced."""
        return len(self.graphs)

    @property
    def graphs(self) -> tuple[StepGraph, ...]:
        """Every traced step, transformed."""
        return tuple(entry.step for entries in self._entries.values() for entry in entries)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step. Raises :class:`CaptureError` for a step that cannot be traced, and for state that does not fit.

        ``last_step`` is the captured step's own keyword where a transform moves work into the next call, else ``function``'s.
        """
        last_step = bool(kwargs.pop("last_step", False)) if self._crossing is not None else False
        arguments, live = Arguments(args, kwargs), Live(self._model, self._optimizers)
        making = Making(live, self._removed, self._added)
        try:
            entry = self._entry(arguments, live, making)
            making.make(value for values in entry.step.inputs.values() for value in values)
            if entry.iterating is not None and self._crossing is not None:
                return self._iterate(entry, entry.iterating, lambda: Values(arguments, live, self.state), last_step)
            values = Values(arguments, live, self.state)
            inputs = values.gather(entry.step.inputs["joint"])
            with torch.no_grad():
                results = entry.step.graphs["joint"](*inputs)
        except BaseException:
            making.undo()
            raise
        return self._reply(entry, values, values.write(entry.step.outputs["joint"], results, entry.traced.cleared))

    def _iterate(self, entry: _Entry, iterating: Iterating, take: Callable[[], Values], last_step: bool) -> Any:
        assert self._crossing is not None
        values, given = self._crossing.step(iterating, take, entry.traced.cleared)
        reply = self._reply(entry, values, given)
        if last_step:
            self._crossing.finish(take)
        return reply

    def _reply(self, entry: _Entry, values: Values, given: Mapping[str, Any]) -> Any:
        made = entry.traced.made
        leaves = [
            given[leaf.value] if leaf.kind == "output" else values.own(leaf.value) if leaf.kind == "input" else leaf.value
            for leaf in made.leaves
        ]
        return pytree.tree_unflatten(leaves, made.spec)

    def _entry(self, arguments: Arguments, live: Live, making: Making) -> _Entry:
        around = around_of(self._function, live, self._subgraphs)
        key = signature(arguments, live, around)
        found = next((entry for entry in self._entries.get(key, ()) if entry.fits(live)), None)
        if found is not None:
            return found
        traced = trace_call(self._function, arguments, live, self._removed, self._overrides)
        refuse_changed(around, around_of(self._function, live, self._subgraphs))
        refuse_shared_writes(shared_memory(arguments, live), traced.made.outputs)
        step = described(traced.made, live)
        making.make(step.inputs["joint"])
        states = live.states() | self._removed | self.state
        result = transformed(step, states, self.state, self._transforms)
        self._keep(result, live, making)
        entry = _Entry(traced, result.step, iterating_of(result.step, traced, self._crossing))
        self._entries.setdefault(key, []).append(entry)
        return entry

    def _keep(self, result: Transformed, live: Live, making: Making) -> None:
        """State that came and went."""
        self._added.update(result.added)
        self.state.update(result.added)
        self._removed.update(result.removed)
        making.drop(result.removed)
