"""Two reductions on their way to a sum, and whether what they send may be added instead of what they bring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import written
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.passes.fake import fake_value
from pytest_fxbucket.transforms.merge_duplicates.forms import form_of
from pytest_fxbucket.transforms.merge_duplicates.sent import Sent

if TYPE_CHECKING:
    from torch import fx

_OPERATORS = frozenset({"_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_reduce"})
_LINEAR = ("sum", "avg")
_SHOWS = frozenset(
    f"aten::{name}"
    for name in (
        *("detach", "alias", "clone", "contiguous", "view", "_unsafe_view", "reshape", "flatten", "squeeze", "unsqueeze"),
        "_to_copy",
    )
)
"""Operators that keep all elements in their order."""
PERMUTES = _SHOWS | {"aten::t", "aten::transpose", "aten::permute"}
"""Operators that keep all elements, each as it is: the sum of two that went through them is that of the two, through them."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """What one reduction brings, on its way to a sum."""

    sent: Sent
    """As the graph had it at first; what it sends now may be a sum."""
    way: tuple[fx.Node, ...]
    """What it goes through from its wait on, the wait first; what waits for it again is in it too."""

    @property
    def launch(self) -> fx.Node:
        """The launching node."""
        return self.sent.launch

    @property
    def steps(self) -> list[fx.Node]:
        """:attr:`way` without waits."""
        return [node for node in self.way if not collectives.is_wait(node)]

    @property
    def sends(self) -> fx.Node:
        """What it sends now."""
        return self.launch.all_input_nodes[0]


def why_apart(node: fx.Node, one: Reduced, other: Reduced) -> str:
    """Why the sum ``node`` must stay behind ``one`` and ``other``, written memory aside; empty if it need not."""
    found = _other_sum(node) or _of_one(node, one) or _of_one(node, other) or _differ(one, other)
    return found or ("" if form_of(node) == form_of(one.way[-1]) else "the sum lies otherwise in memory than its addends")


def _other_sum(node: fx.Node) -> str:
    if written(node):
        return f"{node.name} adds in place"
    alpha: Any = node.kwargs.get("alpha", 1)
    return "" if alpha == 1 else f"{node.name} adds {alpha} times the second"


def _of_one(node: fx.Node, reduced: Reduced) -> str:
    launch, way = reduced.launch, reduced.way
    if operator_name(launch) not in _OPERATORS:
        return f"{launch.target} ({launch.name}) is not merged"
    if reduced.sent.problem:
        return f"{launch.name}: {reduced.sent.problem}"
    if (op := collectives.argument(launch, "reduce_op")) not in _LINEAR:
        return f"{launch.name} reduces by {op}, expected {' or '.join(_LINEAR)}"
    for step, reader in zip((launch, *way), (*way, node), strict=True):
        if foreign := next((user for user in step.users if user is not reader), None):
            return f"{foreign.name} reads what {launch.name} brings, too"
    if changes := next((step for step in reduced.steps if not _keeps_all(step)), None):
        return f"{changes.target} ({changes.name}) stands between {launch.name} and the sum"
    return "" if fake_value(reduced.sends).is_contiguous() else f"{launch.name} sends what is not contiguous"


def _keeps_all(step: fx.Node) -> bool:
    before, after = fake_value(step.all_input_nodes[0]), fake_value(step)
    return operator_name(step) in PERMUTES and (before.dtype, before.device) == (after.dtype, after.device)


def _differ(one: Reduced, other: Reduced) -> str:
    """In what both differ that must be the same."""
    if one.sent.says != other.sent.says:
        return "they differ in kind, operation, ranks or process group"
    forms = [(form_of(reduced.sends), form_of(reduced.launch)) for reduced in (one, other)]
    if forms[0] != forms[1]:
        return "they reduce tensors of other shapes, dtypes or devices"
    if all(operator_name(step) in _SHOWS for reduced in (one, other) for step in reduced.steps):
        is_same = form_of(one.way[-1]) == form_of(other.way[-1])
    else:
        ways = [[(step.target, repr(step.args[1:]), repr(step.kwargs)) for step in reduced.steps] for reduced in (one, other)]
        is_same = ways[0] == ways[1]
    return "" if is_same else "they do not go the same way to the sum"
