"""Which modules are overridden, and by what; each module's callable is asked once, before anything is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_fxbucket.capture.blame import blamed
from pytest_fxbucket.compat.trace import is_fake
from pytest_fxbucket.errors import CaptureError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Override:
    """How one module is overridden in a captured step."""

    by: Literal["call"] | Callable[..., Any] = "call"
    """``"call"``: the real module is called when the graph runs. Else ``callable(module, **args)``, asked once for each module,
    which gives a :class:`Subgraph` or the ``forward`` of one."""
    args: Mapping[str, Any] = field(default_factory=dict)
    output: Callable[..., Any] | None = None
    """``callable(module, *args, **kwargs)`` gives what a call would, of fake tensors, for ``by = "call"``; left out: a tensor
    like the first that it is given."""


@dataclass(frozen=True, slots=True)
class Subgraph:
    """What is traced in an overridden module's place."""

    forward: Callable[..., Any]
    """``forward(tensors, *args, **kwargs)`` gives what the module's forward would. ``tensors`` has parameters and buffers by
    their names within the module, and state; a parameter that it does not read is neither gathered nor given a gradient. With
    state: ``(output, {name: new value})``."""
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """First values of what it keeps from call to call and from step to step, as ``<FQN>.<name>``; without gradients."""


@dataclass(frozen=True, slots=True)
class Overridden:
    """One module that is overridden."""

    fqn: str
    module: nn.Module
    key: str
    """Under which graphs that run find the module."""
    where: str
    """Who asked for it, as errors begin."""
    output: Callable[..., Any] | None
    subgraph: Subgraph | None
    """None: the real module is called."""
    by: str = "call"
    """What gave the sub-graph, for people."""

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """First values of its state, by FQN."""
        return {f"{self.fqn}.{name}": tensor for name, tensor in (self.subgraph.state if self.subgraph else {}).items()}


@dataclass(frozen=True)
class Overrides:
    """All modules of a model that are overridden, by FQN."""

    of: Mapping[str, Overridden] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.of)

    @property
    def first_state(self) -> dict[str, torch.Tensor]:
        """First values of all state, by FQN."""
        return {name: tensor for one in self.of.values() for name, tensor in one.state.items()}

    def told(self) -> Iterator[str]:
        """A clause for each module."""
        for fqn, one in self.of.items():
            yield f"{fqn} is overridden by {'a call of the real module' if one.subgraph is None else one.by}"


NONE = Overrides()


def ask(fqn: str, module: nn.Module, override: Override, key: str, where: str) -> Overridden:
    """Ask ``override`` for ``module``. Raises :class:`CaptureError`, beginning with ``where``, for what is no sub-graph."""
    if override.by == "call":
        return Overridden(fqn, module, key, where, override.output, None)
    name = getattr(override.by, "__qualname__", type(override.by).__name__)
    with blamed(lambda: f"{where}: {name} of module {fqn}"):
        made = override.by(module, **override.args)
    if made is None:
        raise CaptureError(
            f"{where}: {name} gave nothing for module {fqn}, so its anchor would be left over; let it return the forward of a "
            'sub-graph, or use by = "call"'
        )
    subgraph = made if isinstance(made, Subgraph) else Subgraph(made)
    if not callable(subgraph.forward):
        kind = type(subgraph.forward).__name__
        raise CaptureError(f"{where}: {name} gave a value of type {kind} for module {fqn}, expected a function or a Subgraph")
    _refuse_wrong_state(fqn, module, subgraph, f"{where}: {name}")
    return Overridden(fqn, module, key, where, None, subgraph, name)


def _refuse_wrong_state(fqn: str, module: nn.Module, subgraph: Subgraph, where: str) -> None:
    taken = {name for name, _ in (*module.named_parameters(), *module.named_buffers(), *module.named_modules())}
    for name, tensor in subgraph.state.items():
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(
                f"{where} gave state {name} of module {fqn} as a value of type {type(tensor).__name__}, expected a tensor"
            )
        if is_fake(tensor):
            raise CaptureError(
                f"{where} gave state {name} of module {fqn} without values: it is made of the module's own tensors, which have "
                "none while a plan is traced; make it of numbers, as torch.zeros does"
            )
        if name in taken or "." in name or not name:
            raise CaptureError(
                f"{where} calls state of module {fqn} {name!r}, which is {'taken' if name in taken else 'no name'}; give it "
                "one "
                "without dots that nothing in the module has"
            )
