"""Which nodes are collectives, and what each one says (kind, op, process group, sizes); the table of kinds."""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem as _getitem
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from pytest_fxbucket.graph.ops import by_operator, operator_name

if TYPE_CHECKING:
    from torch import fx

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "other"]


class KindRow(NamedTuple):
    """A kind of collectives: all operators that do the same, to one tensor or several, in place or not, autograd's as well."""

    kind: Kind
    operator: str
    """Beginning of the names of its operators."""
    brings: Literal["all parts", "own part", "as much"] = "as much"
    """What a rank receives: the bytes of all ranks, its own part of what each rank sends, or as many bytes as it sends."""
    reduces: bool = False
    """Whether it reduces gradients."""
    merged: tuple[str, ...] = ()
    """Endings of the names of the operators that our pass merges; () if it merges none."""


KINDS = (
    KindRow("all_gather", "all_gather_into_tensor", "all parts", merged=("", "_coalesced", "_out")),
    KindRow("reduce_scatter", "reduce_scatter_tensor", "own part", reduces=True, merged=("", "_coalesced")),
    KindRow("all_reduce", "all_reduce", reduces=True, merged=("", "_coalesced")),
    KindRow("all_to_all", "all_to_all_single"),
    KindRow("broadcast", "broadcast"),
    KindRow("other", ""),
)
"""Every kind. An operator is of the first kind whose beginning its name has, so ``other`` must stay last."""
ROWS = {row.kind: row for row in KINDS}
REDUCTIONS = tuple(row.kind for row in KINDS if row.reduces)
"""Kinds that reduce gradients."""
MERGED = {f"_c10d_functional::{row.operator}{end}": row.kind for row in KINDS for end in row.merged}
"""Kind of each operator that our pass merges, by name."""
NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
"""Namespaces of operators that launch and wait."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collective:
    """What is launched, be it read off a graph or for a pass to merge."""

    kind: Kind
    op: str
    """Reduction: sum, avg, ...; empty for a gather."""
    group: str
    """Name of the process group."""
    dtype: torch.dtype | None
    """None if it launches tensors of several."""
    bytes: int
    """Size of the larger side: the gathered result, or the input that is reduced."""


class Launch(NamedTuple):
    """A collective as its node says it."""

    node: fx.Node
    kind: Kind
    op: str
    """As :attr:`Collective.op`."""
    group: str
    operator: str
    ranks: object
    """Size of the process group; None if the operator does not say it, as an all-reduce does not."""

    @property
    def parts(self) -> int:
        """How many ranks' parts the larger side has: the size of the group, or 1 if both sides are equally large."""
        return self.ranks if ROWS[self.kind].brings != "as much" and isinstance(self.ranks, int) else 1


def flight(op: torch._ops.OpOverload) -> Kind | Literal["wait"] | None:
    """Kind of the collective that ``op`` launches, "wait" if it waits for one; None for what does not communicate."""
    namespace, _, name = op._schema.name.partition("::")
    if namespace not in NAMESPACES or name == "_wrap_tensor_autograd":  # That one only wraps the tensor of a launch.
        return None
    return "wait" if name == "wait_tensor" else next(row.kind for row in KINDS if name.startswith(row.operator))


_NO_FLIGHT: Kind | Literal["wait"] | None = None
_flight = by_operator(flight, _NO_FLIGHT)


def flight_of(node: fx.Node) -> Kind | Literal["wait"] | None:
    """Like :func:`flight`, for the operator that ``node`` calls; None if it calls none."""
    return _flight(node)


def is_wait(node: fx.Node) -> bool:
    """Whether ``node`` waits for a collective."""
    return _flight(node) == "wait"


def launch_kind(node: fx.Node) -> Kind | None:
    """Kind of the collective that ``node`` launches; None if it launches none."""
    found = _flight(node)
    return None if found == "wait" else found


def communicates(node: fx.Node) -> bool:
    """Whether ``node`` launches a collective or waits for one."""
    return _flight(node) is not None


def is_all_gather(node: fx.Node) -> bool:
    """Whether ``node`` launches an all-gather."""
    return _flight(node) == "all_gather"


def is_reduce_scatter(node: fx.Node) -> bool:
    """Whether ``node`` launches a reduce-scatter."""
    return _flight(node) == "reduce_scatter"


def read_launch(node: fx.Node) -> Launch | None:
    """The collective that ``node`` launches, or None."""
    kind = launch_kind(node)
    if kind is None:
        return None
    op, group = (str(argument(node, name) or "") for name in ("reduce_op", "group_name"))
    return Launch(node, kind, op, group, operator_name(node).split("::")[1], argument(node, "group_size"))


def _defaults(op: torch._ops.OpOverload) -> dict[str, tuple[int, Any]]:
    """Place and default value of each argument, by name."""
    return {a.name: (i, a.default_value if a.has_default_value() else None) for i, a in enumerate(op._schema.arguments)}


_NO_ARGUMENTS: dict[str, tuple[int, Any]] = {}
_arguments = by_operator(_defaults, _NO_ARGUMENTS)


def argument(node: fx.Node, name: str) -> object:
    """Value of the operator's argument ``name`` at ``node``; None if it has none of that name."""
    known = _arguments(node).get(name)
    if known is None:
        return None
    index, default = known
    args = node.args
    return args[index] if index < len(args) else node.kwargs.get(name, default)


def rows_exchanged(launch: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(rows received of each member, rows sent to each) of an all-to-all; () where these numbers are not in the graph."""
    lists = (argument(launch, f"{of}_split_sizes") for of in ("output", "input"))
    received, sent = (
        tuple(one) if isinstance(one, (list, tuple)) and all(isinstance(n, int) for n in one) else () for one in lists
    )
    return received, sent


def is_sent_to_one(launch: fx.Node) -> bool:
    """Whether ``launch`` is an all-to-all that sends all it has to one member, as round a ring."""
    return sum(map(bool, rows_exchanged(launch)[1])) == 1


def sent_by(node: fx.Node) -> object:
    """First argument of the launch or wait ``node``, given by place or by name: what is sent, or waited for."""
    name = next(iter(_arguments(node)), None)
    return None if name is None else argument(node, name)


def tensors_sent(node: fx.Node) -> list[fx.Node]:
    """What the launch ``node`` sends, one tensor or a list of them, as nodes."""
    sent = sent_by(node)
    return [one for one in (sent if isinstance(sent, (list, tuple)) else [sent]) if isinstance(one, torch.fx.Node)]


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
    """Tensors in a node's ``meta["val"]``, those in lists of lists, which a fused update gives, as well."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value for tensor in tensors(one)] if isinstance(value, (list, tuple)) else []
