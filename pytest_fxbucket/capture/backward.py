"""Backward while a step is traced: called inside forward, computed again by checkpoints, dense for embeddings.

A loss that goes backward chunk by chunk calls ``backward()`` within forward. It leaves in ``.grad`` of leaves what it leaves in
eager mode. Gradients of parameters are added up in the dtype of the reduction and reduced once, with the last microbatch, as
under FSDP2 with ``set_requires_gradient_sync(False)`` until the last chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from pytest_fxbucket.compat.modules import TorchFunctionMode, is_compiled
from pytest_fxbucket.compat.tracing import caches_unversioned
from pytest_fxbucket.graph import walks
from pytest_fxbucket.step.roles import Parameter
from pytest_fxbucket.words import some


class StageRead(NamedTuple):
    """A parameter as one pipeline stage reads it, which gathers it for itself."""

    fqn: str
    stage: int


Add = Callable[[StageRead, torch.Tensor], None]
"""Takes a parameter's gradient that is not reduced yet."""


@contextmanager
def backward_in_forward(whole: Mapping[StageRead, torch.Tensor], add: Add) -> Iterator[None]:
    """While inside, ``backward()`` stops at the gathered parameters ``whole`` and hands their gradients to ``add``."""

    torch_backward = torch.autograd.backward

    def backward(
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        # torch's own backward would go on from a gathered parameter through its gather, and reduce a part of the gradient. So
        # gradients are asked for by name: of leaves, which get them in ``.grad``, and of gathered parameters.
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        asked = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs or ())
        parameters, leaves = reached(roots, whole)
        if asked:
            parameters = {read: one for read, one in parameters.items() if any(one is tensor for tensor in asked)}
            leaves = [one for one in asked if not any(one is tensor for tensor in parameters.values())]
        seeds = grad_tensors if grad_tensors is None or not isinstance(grad_tensors, torch.Tensor) else [grad_tensors]
        ends = [*leaves, *parameters.values()]
        if not ends:
            # Nothing has a gradient, so that this raises what torch says of it.
            torch_backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            return
        made = torch.autograd.grad(roots, ends, seeds, retain_graph, create_graph, allow_unused=True)
        for leaf, gradient in zip(leaves, made, strict=False):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        for read, gradient in zip(parameters, made[len(leaves) :], strict=True):
            if gradient is not None:
                add(read, gradient)

    with patch.object(torch.autograd, "backward", backward):
        yield


def reached(
    roots: Sequence[torch.Tensor], whole: Mapping[StageRead, torch.Tensor]
) -> tuple[dict[StageRead, torch.Tensor], list[torch.Tensor]]:
    """The gathered parameters among ``whole`` that ``roots`` are made of, and the other leaves that they are made of."""
    # A gathered parameter that has a gather behind it is known by its autograd node, where the walk stops. One without is a
    # leaf itself, which autograd's node for it holds as ``variable``.
    of = {one.grad_fn: read for read, one in whole.items() if one.grad_fn is not None}
    own = {id(one): read for read, one in whole.items() if one.grad_fn is None}
    found: dict[StageRead, torch.Tensor] = {}
    leaves: list[torch.Tensor] = []
    for node in autograd_nodes(roots, of):
        leaf = getattr(node, "variable", None)
        read = of.get(node) if leaf is None else own.get(id(leaf))
        if read is not None:
            found[read] = whole[read]
        elif leaf is not None:
            leaves.append(leaf)
    return found, leaves


def autograd_nodes(roots: Iterable[torch.Tensor], ends: Container[Any] = ()) -> list[Any]:
    """Every autograd node that ``roots`` are made of, each once, nearest first; the walk does not go on behind ``ends``."""

    def behind(node: Any) -> Iterator[Any]:
        return (child for child, _ in (() if node in ends else node.next_functions) if child is not None)

    return walks.reached((root.grad_fn for root in roots if root.grad_fn is not None), behind)


# Activation checkpointing while a step is traced: what backward computes again is traced in it, reentrant or not.
#
# ``torch.utils.checkpoint`` with ``use_reentrant=True`` runs the module without a graph of its own and starts a second backward
# within the first, whose gradients no traced function can give. The other form computes the same, by saved tensors.


@contextmanager
def checkpoints_traced(edges: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """While inside, reentrant checkpoints run in the other form, but sum gradients in the order of reentrant ones.

    Inside ``edges()`` each parameter is read behind an :func:`edge` of its own.
    """
    with patch.object(torch_checkpoint, "CheckpointFunction", _Saved(edges)), caches_unversioned():
        yield


@dataclass(frozen=True, slots=True)
class _Saved:
    """Stands in the place of ``CheckpointFunction``, and is called like it."""

    edges: Callable[[], AbstractContextManager[None]]

    def apply(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """What ``function`` gives for ``args``."""
        if not any(map(_has_gradient, args)):
            with torch.no_grad():  # torch warns here, and gives what is in it no gradient
                return function(*args)

        def apart(*args: Any) -> Any:
            with self.edges():
                return function(*args)

        # A reentrant checkpoint ends a backward of its own at its inputs and parameters, so it gives each one sum. The other
        # form would add each use to the gradients from elsewhere, one by one, which rounds otherwise.
        given = [edge(one) if _has_gradient(one) else one for one in args]
        return torch_checkpoint.checkpoint(apart, *given, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _has_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def edge(value: torch.Tensor) -> torch.Tensor:
    """``value`` as another tensor: gradients from within a checkpoint are summed here, before they meet others."""
    return with_gradient(value, lambda one: one.view_as(one), lambda gradient: gradient)


There = Callable[[torch.Tensor], torch.Tensor]
Back = Callable[[torch.Tensor], torch.Tensor | None]


def with_gradient(value: torch.Tensor, there: There, back: Back) -> torch.Tensor:
    """``there`` of ``value``, whose gradient is ``back`` of the result's, whatever ``there`` is made of; None: it has none."""
    turned: torch.Tensor = _Turned.apply(value, there, back)
    return turned


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, there: There, back: Back) -> torch.Tensor:
        ctx.back = back
        return there(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        return ctx.back(gradient), None, None


def together(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """``inputs`` as other tensors: what is read of all of them here has its gradients summed before any goes on."""
    given: tuple[torch.Tensor, ...] = _Together.apply(*inputs)
    return given


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


_LOOK_UPS = (torch.nn.functional.embedding, torch.nn.functional.embedding_bag)


class DenseGradients(TorchFunctionMode):
    """While entered, look-ups with ``sparse=True`` give the same gradient, dense; :attr:`modules` are those that asked.

    ``module`` gives the FQN of the module that runs.
    """

    def __init__(self, module: Callable[[], str]) -> None:
        super().__init__()
        self.modules: dict[str, None] = {}
        self._module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOOK_UPS and kwargs.get("sparse"):
            kwargs = {**kwargs, "sparse": False}
            self.modules[self._module()] = None
        return func(*args, **kwargs)


def notes_of(model: nn.Module, parameters: Sequence[Parameter], dense: DenseGradients, held: Sequence[str]) -> Iterator[str]:
    """A clause for each thing that was traced otherwise than ``model`` has it; ``held`` are inputs that no module registers."""
    if compiled := [fqn or "the model" for fqn, module in model.named_modules() if is_compiled(module)]:
        yield f"{some(compiled)} run as what torch.compile wraps"
    if looking_up := [fqn or "the model" for fqn in dense.modules]:
        yield f"{some(looking_up)} with dense gradients in place of sparse ones"
    if scalars := [parameter.fqn for parameter in parameters if parameter.shard_shape and not parameter.shape]:
        yield f"{some(scalars)} without dimension, sharded as one element, where FSDP2 asks for the shape (1,)"
    if held:
        yield f"{some(held)} held in no parameter or buffer, and inputs all the same"
