"""Which nodes are collectives, and what each one says: kind, op, process group, sizes."""

from __future__ import annotations

from operator import getitem as _getitem
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from pytest_fxbucket.graph.ops import by_operator, operator_name

if TYPE_CHECKING:
    from torch import fx

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "other"]
REDUCTIONS: tuple[Kind, ...] = ("reduce_scatter", "all_reduce")
"""Kinds that reduce gradients."""

_KINDS: tuple[tuple[str, Kind], ...] = (
    ("all_gather_into_tensor", "all_gather"),
    ("reduce_scatter_tensor", "reduce_scatter"),
    ("all_reduce", "all_reduce"),
    ("all_to_all_single", "all_to_all"),
    ("broadcast", "broadcast"),
)
_NAMESPACES = ("_c10d_functional::", "_c10d_functional_autograd::", "c10d_functional::")


class Launch(NamedTuple):
    """A collective as its node says it."""

    node: fx.Node
    kind: Kind
    op: str
    """Reduction: sum, avg, ...; empty for a gather."""
    group: str
    """Name of the process group."""
    operator: str


def is_wait(node: fx.Node) -> bool:
    """Whether ``node`` waits for a collective."""
    return _waits(node)


def launch_kind(node: fx.Node) -> Kind | None:
    """Kind of the collective that ``node`` launches; None if it launches none."""
    return _kind(node)


def is_waiting(op: torch._ops.OpOverload) -> bool:
    """Whether ``op`` waits for a collective."""
    return str(op._schema.name).endswith("_c10d_functional::wait_tensor")


_waits = by_operator(is_waiting, False)


def launching(op: torch._ops.OpOverload) -> Kind | None:
    """Kind of the collective that ``op`` launches; None if it launches none."""
    if not op._schema.name.startswith(_NAMESPACES) or is_waiting(op):
        return None
    name = op._schema.name.split("::")[1]
    return next((kind for prefix, kind in _KINDS if name.startswith(prefix)), "other")


def _defaults(op: torch._ops.OpOverload) -> dict[str, tuple[int, Any]]:
    """Place and default value of each argument, by name."""
    return {a.name: (i, a.default_value if a.has_default_value() else None) for i, a in enumerate(op._schema.arguments)}


_NO_KIND: Kind | None = None
_kind = by_operator(launching, _NO_KIND)
_NO_ARGUMENTS: dict[str, tuple[int, Any]] = {}
_arguments = by_operator(_defaults, _NO_ARGUMENTS)


def is_all_gather(node: fx.Node) -> bool:
    """Whether ``node`` launches an all-gather."""
    return launch_kind(node) == "all_gather"


def is_reduce_scatter(node: fx.Node) -> bool:
    """Whether ``node`` launches a reduce-scatter."""
    return launch_kind(node) == "reduce_scatter"


def read_launch(node: fx.Node) -> Launch | None:
    """The collective that ``node`` launches, or None."""
    kind = launch_kind(node)
    if kind is None:
        return None
    reduction = argument(node, "reduce_op")
    group = argument(node, "group_name")
    return Launch(node, kind, str(reduction or ""), str(group or ""), operator_name(node).split("::")[1])


def argument(node: fx.Node, name: str) -> object:
    """Value of the operator's argument ``name`` at ``node``; None if it has none of that name."""
    known = _arguments(node).get(name)
    if known is None:
        return None
    index, default = known
    args = node.args
    return args[index] if index < len(args) else node.kwargs.get(name, default)


def sent_by(node: fx.Node) -> object:
    """First argument of the launch or wait ``node``, given by place or by name: what is sent, or waited for."""
    name = next(iter(_arguments(node)), None)
    return None if name is None else argument(node, name)


def waits_of(launch: fx.Node) -> list[fx.Node]:
    """Waits for what ``launch`` launched; those of a coalesced launch lie behind ``getitem``."""
    found = []
    for user in launch.users:
        if is_wait(user):
            found.append(user)
        elif user.op == "call_function" and user.target is _getitem:
            found.extend(wait for wait in user.users if is_wait(wait))
    return found


def tensors(value: object) -> list[torch.Tensor]:
    """Tensors in a node's ``meta["val"]``."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, (list, tuple)) else []
