"""Hooks of the whole model: the first and the last stage run them, with the model's own arguments and outputs.

They are no part of the stages' graphs, since forward is traced without them. Hooks of modules inside the model are traced.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import BackwardHook

from pytest_fxbucket.compat import modules
from pytest_fxbucket.errors import StageError
from pytest_fxbucket.pipeline.values import OutputPlace, exchanged, leaves_of, refuse_other_arguments


@dataclass(frozen=True)
class Hooks:
    """A model with hooks, and how it is called."""

    model: nn.Module
    call: Any
    """Positional and keyword arguments, with a place for each tensor."""
    paths: Mapping[int, str]
    """Path in the arguments of each place in ``call``, by the place's number."""
    signature: inspect.Signature
    leaves: Mapping[str, Any]
    """Leaves of the traced arguments, by path."""

    def entered(self, received: Sequence[torch.Tensor], names: Sequence[str]) -> tuple[torch.Tensor, ...]:
        """What the first stage receives, in the order of ``names``, after the model's hooks before forward have run.

        Raises :class:`StageError` if a hook gives arguments that the stages were not traced for.
        """
        hooks = modules.forward_pre_hooks(self.model)
        if not hooks:
            return tuple(received)
        # As ``Module.__call__`` does it: a hook that takes keyword arguments gives both kinds, any other one positional
        # arguments only, in a tuple or a single one.
        args, kwargs = self._called(received, names)
        for hook, with_kwargs in hooks:
            given = hook(self.model, args, kwargs) if with_kwargs else hook(self.model, args)
            if given is not None and with_kwargs:
                args, kwargs = given
            elif given is not None:
                args = given if isinstance(given, tuple) else (given,)
        leaves = leaves_of(self.signature, args, kwargs)
        refuse_other_arguments(self.leaves, leaves)
        return tuple(leaves[name] for name in names)

    def left(self, output: Any, received: Sequence[torch.Tensor], names: Sequence[str]) -> Any:
        """What the model gives after its hooks behind forward, which get the arguments: ``received`` has all of the batch."""
        for hook, with_kwargs in modules.forward_hooks(self.model):
            args, kwargs = self._called(received, names)
            given = hook(self.model, args, kwargs, output) if with_kwargs else hook(self.model, args, output)
            output = output if given is None else given
        return output

    def behind_backward(self) -> BackwardHook | None:
        """Runs the hooks behind backward, on the first stage: with gradients of the model's inputs and of what it sends."""
        hooks, _ = modules.backward_hooks(self.model)
        return BackwardHook(self.model, hooks, []) if hooks else None

    def before_backward(self) -> BackwardHook | None:
        """Runs the hooks before backward, on the last stage: with the gradients of the model's outputs."""
        _, hooks = modules.backward_hooks(self.model)
        return BackwardHook(self.model, [], hooks) if hooks else None

    def _called(self, received: Sequence[torch.Tensor], names: Sequence[str]) -> Any:
        values = dict(zip(names, received, strict=True))
        return exchanged(self.call, lambda leaf: values[self.paths[leaf.number]] if isinstance(leaf, OutputPlace) else leaf)


def hooks_of(
    model: nn.Module, signature: inspect.Signature, leaves: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Hooks | None:
    """The hooks of ``model``, called with ``args`` and ``kwargs``; None if it has none.

    Raises :class:`StageError` for hooks of ``register_backward_hook``.
    """
    if modules.has_partial_backward_hooks(model):
        raise StageError(
            "the model has a hook of register_backward_hook, which sees one operator alone; use register_full_backward_hook"
        )
    if not any((modules.forward_pre_hooks(model), modules.forward_hooks(model), *modules.backward_hooks(model))):
        return None
    # The call with numbers in place of its tensors. Its leaves by path then say under which path a stage receives each of them.
    count = iter(range(1 << 30))
    call = exchanged((args, dict(kwargs)), lambda leaf: OutputPlace(next(count)) if isinstance(leaf, torch.Tensor) else leaf)
    placed = leaves_of(signature, *call)
    return Hooks(
        model, call, {leaf.number: path for path, leaf in placed.items() if isinstance(leaf, OutputPlace)}, signature, leaves
    )
