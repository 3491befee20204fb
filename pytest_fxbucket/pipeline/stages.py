"""Stages of a model: modules that run one after the other, each with its own parameters and buffers of the model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, overload

import torch
from torch import fx, nn

from pytest_fxbucket.compat import pytree
from pytest_fxbucket.errors import StageError
from pytest_fxbucket.pipeline.hooks import Hooks
from pytest_fxbucket.pipeline.values import OutputPlace, exchanged, leaves_of, parted, refuse_other_arguments
from pytest_fxbucket.step.pipelined import Crossing
from pytest_fxbucket.words import counted, human_bytes


@dataclass(frozen=True, slots=True)
class Summary:
    """What a stage holds, receives and sends."""

    index: int
    modules: tuple[str, ...]
    """FQNs of modules whose calls begin and end in it."""
    parameters: tuple[str, ...]
    """First FQNs of the parameters that it reads."""
    buffers: tuple[str, ...]
    receives: tuple[Crossing, ...]
    """In the order in which they are passed, which is that of the graph; the first stage receives the tensors of the batch."""
    sends: tuple[Crossing, ...]
    """Empty in the last stage, which gives what the model gives."""
    read: tuple[Crossing, ...]
    """The values among ``receives`` that the stage reads itself."""
    flops: int
    """FLOPs of its forward, by ``torch.utils.flop_counter``."""

    @property
    def makes(self) -> tuple[Crossing, ...]:
        """The values that it sends and did not receive."""
        return tuple(one for one in self.sends if one not in self.receives)

    @property
    def passes_on(self) -> tuple[Crossing, ...]:
        """The values that it reads and also sends on as it received them, since a later stage reads them, too."""
        return tuple(one for one in self.sends if one in self.read)

    @property
    def bypasses(self) -> tuple[Crossing, ...]:
        """The values that it sends on as it received them and does not read itself."""
        return tuple(one for one in self.sends if one in self.receives and one not in self.read)


class Stage(nn.Module):
    """One stage: takes the tensors of ``summary.receives`` and gives the tensors of ``summary.sends`` as a tuple.

    The last stage gives what the model gives. Parameters and buffers are the model's own, by the model's FQNs, so the stage's
    state dict is a part of the model's. It runs in the mode, training or not, that it was traced in.
    """

    def __init__(
        self,
        summary: Summary,
        graph_module: fx.GraphModule,
        root: nn.Module,
        held: Sequence[str],
        result: Any = None,
        hooks: Hooks | None = None,
    ) -> None:
        """``graph_module`` takes parameters and buffers ``held``, by first FQNs in ``root``, then what the stage receives."""
        super().__init__()
        self.summary, self.held = summary, tuple(held)
        self._hooks = (hooks,)
        self._graph, self._result = (graph_module,), result  # in a tuple, so that it is no child of the module
        # Under every FQN that the model has for it, so that a tied parameter is tied in the stage and in its state dict, too.
        wanted = {id(tensor_at(root, fqn)) for fqn in held}
        for fqn, module in root.named_modules(remove_duplicate=False):
            for table in ("_parameters", "_buffers"):
                for name, tensor in getattr(module, table).items():
                    if id(tensor) in wanted:
                        place = _module_at(self, fqn)
                        getattr(place, table)[name] = tensor
                        if name in module._non_persistent_buffers_set:
                            place._non_persistent_buffers_set.add(name)
        super().train(root.training)  # its own ``train`` does nothing

    @property
    def graph_module(self) -> fx.GraphModule:
        """Its graph: takes its parameters and buffers, then what it receives; gives a flat list."""
        return self._graph[0]

    @property
    def is_last(self) -> bool:
        """Whether it gives what the model gives."""
        return self._result is not None

    def train(self, mode: bool = True) -> Stage:
        """Do nothing: a stage runs in the mode in which it was traced."""
        return self

    def forward(self, *received: torch.Tensor) -> Any:
        """Run on what the stage receives; the first stage and the last one run hooks of the model, too."""
        hooks, names = self._hooks[0], [one.name for one in self.summary.receives]
        if hooks is None:
            return self.restored(self.computed(*received))
        # Hooks around backward need nodes of autograd: on the first stage at its inputs and outputs, so that hooks behind
        # backward run when all gradients are there; on the last at its outputs, for hooks before backward.
        if self.summary.index == 0:
            received = hooks.entered(received, names)
            backward: Any = hooks.behind_backward()
            received = backward.setup_input_hook(received) if backward is not None else received
        else:
            backward = hooks.before_backward()
        given = self.restored(self.computed(*received))
        if self.is_last:
            given = hooks.left(given, received, names)
        return backward.setup_output_hook(given) if backward is not None else given

    def flat(self, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Like :meth:`forward`, but the last stage gives only the tensors of its result, which :meth:`restored` takes.

        Raises :class:`StageError` where a hook of the model gives another result.
        """
        if self._result is None or self._hooks[0] is None:
            return tuple(self.forward(*received) if self._result is None else self.computed(*received))
        result, tensors = parted(self.forward(*received))
        if result != self._result[0]:
            raise StageError(f"a forward hook gives {result}, but the model {self._result[0]}; engines want one form of result")
        return tuple(tensors)

    def computed(self, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the graph gives for what the stage receives; no hook runs."""
        return tuple(self.graph_module(*[tensor_at(self, fqn) for fqn in self.held], *received))

    def restored(self, given: Sequence[torch.Tensor]) -> Any:
        """The result of :meth:`forward` from that of :meth:`flat`: the last stage's gets its None, numbers and containers."""
        if self._result is None:
            return tuple(given)
        return exchanged(self._result[0], lambda leaf: given[leaf.number] if isinstance(leaf, OutputPlace) else leaf)


def tensor_at(root: nn.Module, fqn: str) -> torch.Tensor:
    """The parameter or buffer ``fqn``, even if ``root`` has other attributes of the names on the way."""
    *path, name = fqn.split(".")
    for part in path:
        root = root._modules[part]  # type: ignore[assignment]  # no name on the way to a tensor is of None
    found = root._parameters.get(name)
    return found if found is not None else root._buffers[name]  # type: ignore[return-value]  # what is held is a tensor


def _module_at(root: nn.Module, fqn: str) -> nn.Module:
    """The module ``fqn``, made where there is none; no name can be in the way of another."""
    for part in fqn.split(".") if fqn else ():
        if part not in root._modules:
            root._modules[part] = nn.Module()
        root = root._modules[part]  # type: ignore[assignment]  # a module was made for each, never None
    return root


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter or buffer that several stages read: the same object in each."""

    fqn: str
    stages: tuple[int, ...]


class Stages(Sequence[Stage]):
    """All stages of a model, in order. Called like the model, they run one after the other, and give what it gives."""

    def __init__(
        self, stages: Sequence[Stage], signature: inspect.Signature, leaves: Mapping[str, Any], unread: Sequence[str]
    ) -> None:
        self._stages = tuple(stages)
        self._signature, self._leaves = signature, pytree.tree_map(_without_data, dict(leaves))
        self.unread = tuple(unread)
        """FQNs of parameters and buffers that forward does not read, and that no stage has for that reason."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all in turn. Raises :class:`StageError` for arguments that differ from the traced ones in more than values."""
        values: Any = self.batch(*args, **kwargs)
        for stage in self:
            values = stage(*values)
        return values

    def batch(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """What the first stage receives for the model's arguments."""
        leaves = leaves_of(self._signature, args, kwargs)
        refuse_other_arguments(self._leaves, leaves)
        return tuple(leaves[one.name] for one in self[0].summary.receives)

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Parameters and buffers that several stages read, in order of first reads; a tied parameter has its first FQN."""
        readers: dict[str, list[int]] = {}
        for stage in self:
            for fqn in (*stage.summary.parameters, *stage.summary.buffers):
                readers.setdefault(fqn, []).append(stage.summary.index)
        return tuple(Tie(fqn, tuple(stages)) for fqn, stages in readers.items() if len(stages) > 1)

    @overload
    def __getitem__(self, index: int) -> Stage: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Stage]: ...

    def __getitem__(self, index: int | slice) -> Stage | Sequence[Stage]:
        return self._stages[index]

    def __len__(self) -> int:
        return len(self._stages)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._stages)

    def __str__(self) -> str:
        return "\n".join(_line(stage) for stage in self)


def _without_data(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf


def _line(stage: Stage) -> str:
    said, size = stage.summary, attrgetter("bytes")
    elements = sum(parameter.numel() for parameter in stage.parameters())
    parts = [f"{counted(elements, 'parameter')}", f"{said.flops:,} FLOPs"]
    for what, crossing in (("receives", said.receives), ("sends", said.sends), ("bypasses", said.bypasses)):
        if crossing:
            parts.append(f"{what} {counted(len(crossing), 'tensor')} ({human_bytes(sum(map(size, crossing)))})")
    return f"stage {said.index}: {', '.join(parts)}"
