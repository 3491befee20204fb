"""Modules of a plan's entries, as ``fully_shard`` takes them: each entry one unit, and the rest with the root."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import nn

from pytest_fxbucket.plan.selector import ResolvedEntry


def units(model: nn.Module, entries: Sequence[ResolvedEntry], left_out: Collection[str] = ()) -> list[list[nn.Module]]:
    """The modules of each of ``entries`` that can be a unit of its own; those named in ``left_out`` are the root's.

    Of a container the modules in it, since nobody calls it. A parameter that two entries share is the root's with both, where
    all of the step can read it. An entry that names a parameter alone has no module.
    """
    named = dict(model.named_modules())
    holders: dict[int, set[str]] = {}
    found: dict[str, list[nn.Module]] = {}
    for entry in entries:
        modules = [named[fqn] for fqn in entry.name.split("+") if fqn in named and fqn]
        if modules and not any(fqn in left_out for fqn in entry.name.split("+")):
            found[entry.name] = [one for module in modules for one in _called(module)]
    inside = {id(module): name for name, modules in found.items() for of in modules for module in of.modules()}
    for module in named.values():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(inside.get(id(module), ""))
    shared = {name for names in holders.values() if len(names) > 1 for name in names}
    return [modules for name, modules in found.items() if name not in shared]


def _called(module: nn.Module) -> Iterator[nn.Module]:
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        yield module
        return
    for child in module.children():
        yield from _called(child)
