"""``backward()`` that a model or a loss calls while its forward runs, as a loss does that goes backward chunk by chunk.

What it leaves in ``.grad`` of leaves is there as in eager mode. Gradients of parameters are added to those that are reduced
with the last microbatch, as under FSDP2 with ``set_requires_gradient_sync(False)`` until the last chunk: in the dtype of the
reduction, and reduced once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

Add = Callable[[str, torch.Tensor], None]
"""Takes the gradient of a parameter, not reduced, by its FQN."""


@contextmanager
def backward_in_forward(whole: Mapping[str, torch.Tensor], add: Add) -> Iterator[None]:
    """While inside, ``backward()`` stops at the gathered parameters ``whole``, whose gradients ``add`` is given."""

    torch_backward = torch.autograd.backward

    def backward(
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        asked = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs or ())
        parameters, leaves = reached(roots, whole)
        if asked:
            parameters = {fqn: one for fqn, one in parameters.items() if any(one is tensor for tensor in asked)}
            leaves = [one for one in asked if not any(one is tensor for tensor in parameters.values())]
        seeds = grad_tensors if grad_tensors is None or not isinstance(grad_tensors, torch.Tensor) else [grad_tensors]
        ends = [*leaves, *parameters.values()]
        if not ends:
            torch_backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)  # it says so
            return
        made = torch.autograd.grad(roots, ends, seeds, retain_graph, create_graph, allow_unused=True)
        for leaf, gradient in zip(leaves, made, strict=False):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        for fqn, gradient in zip(parameters, made[len(leaves) :], strict=True):
            if gradient is not None:
                add(fqn, gradient)

    with patch.object(torch.autograd, "backward", backward):
        yield


def reached(
    roots: Sequence[torch.Tensor], whole: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Those of ``whole`` that ``roots`` are made of, and leaves, both found along autograd's nodes."""
    of = {one.grad_fn: fqn for fqn, one in whole.items() if one.grad_fn is not None}
    own = {id(one): fqn for fqn, one in whole.items() if one.grad_fn is None}
    found: dict[str, torch.Tensor] = {}
    leaves: list[torch.Tensor] = []
    queue = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(queue)
    for node in queue:
        leaf = getattr(node, "variable", None)
        fqn = of.get(node) if leaf is None else own.get(id(leaf))
        if fqn is not None:
            found[fqn] = whole[fqn]
        elif leaf is not None:
            leaves.append(leaf)
        for child, _ in () if fqn is not None else node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)
    return found, leaves
