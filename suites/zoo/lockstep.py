"""All ranks of one group in one process, node by node: no back end, nothing of ours between graph and arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

Values = list[Any]
"""What a node gives on each rank."""


def run_together(module: fx.GraphModule, inputs: Sequence[Sequence[Any]], seed: int) -> list[list[Any]]:
    """What ``module`` gives each rank for that rank's ``inputs``; each begins with ``seed``, all are in the one group."""
    ranks = range(len(inputs))
    states = _States(len(inputs), seed)
    known: dict[fx.Node, Values] = {}
    given = iter(zip(*inputs, strict=True))
    for node in module.graph.nodes:
        if node.op == "placeholder":
            known[node] = list(next(given))
        elif node.op == "get_attr":
            known[node] = [_attribute(module, str(node.target))] * len(inputs)
        elif node.op == "output":
            return [list(fx.node.map_arg(node.args[0], lambda source, rank=rank: known[source][rank])) for rank in ranks]  # type: ignore[arg-type, misc]
        else:
            args = [
                fx.node.map_arg((node.args, node.kwargs), lambda source, rank=rank: known[source][rank])  # type: ignore[misc]
                for rank in ranks
            ]
            known[node] = _called(node, args, states)
    raise AssertionError("a graph ends with its output")


def _called(node: fx.Node, args: Sequence[Any], states: _States) -> Values:
    target: Any = node.target
    together = _TOGETHER.get(getattr(target, "__name__", "").partition(".")[0])
    if together is not None and "c10d" in str(target):
        return together([list(positional) for positional, _ in args])
    is_random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    found = []
    for rank, (positional, keywords) in enumerate(args):
        call = states.of(rank) if is_random or not isinstance(target, torch._ops.OpOverload) else None
        with call or torch.no_grad(), torch.no_grad():
            found.append(target(*positional, **keywords))
    return found


def _attribute(module: fx.GraphModule, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


class _States:
    """One state of the random generator a rank."""

    def __init__(self, ranks: int, seed: int) -> None:
        torch.manual_seed(seed)
        self._states = [torch.get_rng_state() for _ in range(ranks)]
        self._rank = 0

    def of(self, rank: int) -> _States:
        self._rank = rank
        return self

    def __enter__(self) -> None:
        torch.set_rng_state(self._states[self._rank])

    def __exit__(self, *_: object) -> None:
        self._states[self._rank] = torch.get_rng_state()


def _gathered(args: list[list[Any]]) -> Values:
    whole = torch.cat([own[0] for own in args])
    return [whole.clone() for _ in args]


def _reduced(args: list[list[Any]]) -> Tensor:
    kind = args[0][1]
    assert kind in ("avg", "sum"), kind
    total = args[0][0]
    for own in args[1:]:
        total = total + own[0]
    return total / len(args) if kind == "avg" else total


def _scattered(args: list[list[Any]]) -> Values:
    return [part.clone() for part in _reduced(args).chunk(len(args))]


_TOGETHER: dict[str, Callable[[list[list[Any]]], Values]] = {
    "all_gather_into_tensor": _gathered,
    "reduce_scatter_tensor": _scattered,
    "all_reduce": lambda args: [_reduced(args).clone() for _ in args],
    "wait_tensor": lambda args: [own[0] for own in args],
}
