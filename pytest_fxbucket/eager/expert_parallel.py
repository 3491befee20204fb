"""Experts parted over ep in eager steps; it shares no code with captured experts.

Each rank of ``ep`` has some of a module's experts, and tokens travel by ``all_to_all_single`` of torch.distributed. FSDP2
shards the experts over the ranks of ``dp_shard`` that have the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pytest_fxbucket.capture.names import names_of
from pytest_fxbucket.plan.selectors import ResolvedEntry


def part_experts(modules: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
    """Leave this rank of ``group`` its rows of the parameters of ``modules``, and have their tokens travel; in place."""
    rows: dict[int, nn.Parameter] = {}
    for module in modules:
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                own = parameter.detach().chunk(group.size())[group.rank()].clone()
                kept = rows.setdefault(id(parameter), nn.Parameter(own, parameter.requires_grad))
                rows[id(kept)] = kept  # a module within a module is met twice
                setattr(owner, name, kept)
        module.forward = partial(_with_tokens_of_all, module.forward, group)


def _with_tokens_of_all(
    experts: Callable[[Tensor], Tensor], group: dist.ProcessGroup, *given: Tensor, **named: Tensor
) -> Tensor:
    """What the experts of all ranks make of this rank's tokens, the one argument, (experts, capacity, ...)."""
    (tokens,) = (*given, *named.values())
    arrived = torch.cat(_Exchanged.apply(tokens, group).chunk(group.size()), 1)
    made = experts(arrived).split(tokens.shape[1], 1)
    back: Tensor = _Exchanged.apply(torch.cat(made), group)
    return back


class _Exchanged(torch.autograd.Function):
    """The i-th part of dimension 0 goes to rank i. Gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        arrived = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        dist.all_to_all_single(arrived, tokens.contiguous(), group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        arrived = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(arrived, gradient.contiguous(), group=ctx.group)
        return arrived, None


class ExpertUnit(NamedTuple):
    """Modules of experts, or within them, whose parameters are gathered together."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]


def units_of_experts(model: nn.Module, experts: Iterable[str], entries: Iterable[ResolvedEntry]) -> dict[str, ExpertUnit]:
    """A unit, by a name for people, of what each of ``entries`` has of ``experts``, and of what none has.

    A module that has what is left of it comes behind those within it, as FSDP2 wraps them.
    """
    names = names_of(model)
    entry_of = {fqn: entry.name for entry in entries for fqn in entry.parameters}
    found: dict[str, dict[str, list[str]]] = {}

    def find(fqn: str, module: nn.Module) -> None:
        held = list(dict.fromkeys(names[one] for one in _in_unit(fqn, module)))
        if len({entry_of.get(one, "") for one in held}) > 1:
            for name, child in module.named_children():
                find(f"{fqn}.{name}", child)
            held = [names[f"{fqn}.{name}"] for name, _ in module.named_parameters(recurse=False)]
        if held:
            found.setdefault(entry_of.get(held[0], ""), {})[fqn] = held

    for fqn in experts:
        find(fqn, model.get_submodule(fqn))
    place = {fqn: number for number, fqn in enumerate(entry_of)}
    units: dict[str, ExpertUnit] = {}
    for entry, modules in sorted(found.items(), key=lambda one: -min(fqn.count(".") for fqn in one[1])):
        # In the order of the entry, which is that of its bucket's bytes.
        parts = sorted(modules.items(), key=lambda one: min(place.get(fqn, 0) for fqn in one[1]))
        parameters = tuple(fqn for _, held in parts for fqn in held)
        units[f"the experts of {entry or 'no entry'}"] = ExpertUnit(tuple(fqn for fqn, _ in parts), parameters)
    return units


def _in_unit(fqn: str, module: nn.Module) -> Iterator[str]:
    """Parameters of the module ``fqn`` in the order of FSDP2's unit: those of its children before its own."""
    for name, child in module.named_children():
        yield from _in_unit(f"{fqn}.{name}", child)
    yield from (f"{fqn}.{name}" for name, _ in module.named_parameters(recurse=False))


def divide_over(parameters: Iterable[nn.Parameter], ranks: int, dtype: torch.dtype | None) -> None:
    """Divide the gradients of ``parameters``, averages of sums over the tokens of ``ranks``, by ``ranks``; in place.

    ``dtype`` is the one that they were reduced in, in which the captured step divides.
    """
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad
            parameter.grad = (gradient.to(dtype or gradient.dtype) / ranks).to(gradient.dtype)
