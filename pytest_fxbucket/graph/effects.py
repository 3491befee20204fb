"""Side effects of a node's target: what it writes, shares, draws at random, and keeps in flight; read once for each target.

Operators say it by their schemas. Tables below stand in where a schema is silent or wrong. A target that says nothing at all is
a barrier: no node may be moved past it.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_fxbucket.graph.collectives import NAMESPACES as COLLECTIVES
from pytest_fxbucket.graph.collectives import argument, flight
from pytest_fxbucket.graph.ops import held_by

if TYPE_CHECKING:
    from torch import fx

Where = tuple[tuple[int, str], ...]
"""Arguments of a target, each by place and by name."""


@dataclass(frozen=True, slots=True)
class Effects:
    """What calling a target does besides computing a new result from its inputs."""

    writes: Where = ()
    shares: Where = ()
    """Arguments in whose storages the result may live."""
    everything: bool = False
    """It may write every argument, and its result may share every one: nothing more is known."""
    shares_all: bool = False
    """Its result may share every argument."""
    joins: bool = False
    """It makes its arguments share one storage from then on."""
    unless: str = ""
    """Argument that turns the writes off, if it is the constant False."""
    flight: Literal["", "launch", "wait"] = ""
    gives: bool = True
    """Whether it has a result."""
    random: bool = False
    chained: bool = False
    """It acts on the world (asserts, prints, sends to one rank): such nodes keep their order among each other."""
    barrier: str = ""
    """Why nothing may pass it; empty if it is no barrier."""

    @property
    def acts(self) -> bool:
        """Whether it writes, draws or acts on the world, or may: such a node cannot move as freely as its edges allow."""
        return bool(self.writes or self.everything or self.random or self.chained or self.barrier)


PURE = Effects()
_SILENT = "says nothing about what it writes"

_of_operator: dict[int, tuple[torch._ops.OpOverload, Effects]] = {}
"""By ``id``, since hashing an operator is slow. The operator is kept in the value, so that its ``id`` is not used again."""


def effects_of(node: fx.Node) -> Effects:
    """What ``node`` does besides computing a new result from its inputs."""
    target: Any = node.target
    known = _of_operator.get(id(target))
    if known is not None:
        return known[1]
    if node.op == "call_function":
        if isinstance(target, torch._ops.OpOverload):
            found = _operator(node, target)
            _of_operator[id(target)] = target, found
            return found
        if isinstance(target, torch._ops.HigherOrderOperator):
            return _higher_order(node, target)
        return _python(target)
    if node.op == "call_module":
        return Effects(everything=True, barrier="is a module, which may write anything")
    if node.op == "call_method":
        return Effects(everything=True, barrier="is a method, whose name alone is known")
    return PURE


def written(node: fx.Node) -> list[fx.Node]:
    """Arguments of ``node`` whose storages it writes."""
    effects = effects_of(node)
    if effects.everything:
        return arguments_of(node)
    if not effects.writes or (effects.unless and argument(node, effects.unless) is False):
        return []
    return chosen(node, effects.writes)


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Like :func:`written`, but empty for a barrier, which does not say what it writes.

    :attr:`pytest_fxbucket.graph.order.Order.barriers` names those.
    """
    effects = effects_of(node)
    return written(node) if (effects.writes or effects.everything) and not effects.barrier else []


def shared(node: fx.Node, effects: Effects) -> list[fx.Node]:
    """Arguments of ``node`` in whose storages its result may live; ``effects`` are its own."""
    if effects.everything or effects.shares_all:
        return arguments_of(node)
    found = chosen(node, effects.shares) if effects.shares else []
    return found if len(found) < 2 or node.target not in _JOINS else []


def arguments_of(node: fx.Node) -> list[fx.Node]:
    """Arguments of ``node``, without those that only carry an edge (the first of ``control_deps``)."""
    if not is_control_deps(node.target):
        return node.all_input_nodes
    return list(dict.fromkeys(_nodes([*node.args[2:], *node.kwargs.values()])))


def chosen(node: fx.Node, where: Where) -> list[fx.Node]:
    """Nodes that stand in the arguments ``where`` of ``node``, in lists too."""
    found: list[fx.Node] = []
    for place, name in where:
        value = node.args[place] if place < len(node.args) else node.kwargs.get(name)
        if isinstance(value, torch.fx.Node):
            found.append(value)
        elif value is not None:
            found.extend(_nodes(value))
    return found


def _nodes(value: object) -> Iterator[fx.Node]:
    if isinstance(value, torch.fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes(item)


def _operator(node: fx.Node, op: torch._ops.OpOverload) -> Effects:
    name = op._schema.name
    arguments = op._schema.arguments
    annotated = any(argument.alias_info is not None for argument in arguments)
    # From the least trusted to the best known: hidden writes, unknown namespaces without a word, then schemas and tables.
    if name in HIDDEN:
        return Effects(everything=True, barrier="writes what is no argument of its own")
    if op.namespace not in KNOWN and not annotated and torch.Tag.pt2_compliant_tag not in op.tags:
        return Effects(everything=True, barrier=_SILENT)
    random, kind = torch.Tag.nondeterministic_seeded in op.tags, flight(op)
    found = Effects(
        writes=_written_by_schema(op) + _named(op, WRITES.get(name, ())),
        shares=_shared_by_schema(op) + _named(op, SHARES.get(name, ())),
        unless=next((a.name for a in arguments if a.name in TURNED_OFF), "") if name in WRITES and not annotated else "",
        flight="launch" if kind not in (None, "wait") else kind or "",
        joins=name == "aten::set_",
        gives=bool(op._schema.returns),
        random=random,
        chained=_is_chained(node, op, random),
    )
    if op.namespace == "c10d":  # These collectives write into their arguments, and their schemas annotate none.
        return replace(found, everything=True)
    return found


def _is_chained(node: fx.Node, op: torch._ops.OpOverload, random: bool) -> bool:
    if op.namespace in COLLECTIVES:
        return op._schema.name.split("::")[1] in CHAINED
    if op.namespace in CHAINED_NAMESPACES:
        return True
    # torch calls random and writing operators impure, too; those are ordered by what they draw and write.
    return not random and not op._schema.is_mutable and op._schema.name not in WRITES and node.is_impure()


def _written_by_schema(op: torch._ops.OpOverload) -> Where:
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _shared_by_schema(op: torch._ops.OpOverload) -> Where:
    """Arguments whose alias set (``a`` of ``Tensor(a)``) meets that of a result; an empty set or ``*`` meets every set."""
    results = [value.alias_info for value in op._schema.returns if value.alias_info is not None]
    if not results:
        return ()
    letters = {letter for info in results for letter in info.before_set | info.after_set}
    any_result = "*" in letters or any(not info.before_set for info in results)
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(op._schema.arguments)
        if (info := argument.alias_info) is not None
        and (any_result or not info.before_set or not letters.isdisjoint(info.before_set | info.after_set))
    )


def _named(op: torch._ops.OpOverload, names: tuple[str, ...]) -> Where:
    return tuple((place, argument.name) for place, argument in enumerate(op._schema.arguments) if argument.name in names)


def _python(target: Any) -> Effects:
    if target is operator.getitem or target is operator.pos:
        return Effects(shares=((0, "a"),))
    if target in IN_PLACE:
        return Effects(writes=((0, "a"),), shares=((0, "a"),))
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", "")
    # Of module operator functions alone: a methodcaller calls whatever it was made with, and operator.call what it is given.
    is_of_python = isinstance(target, BuiltinFunctionType) and module in ("_operator", "operator", math.__name__)
    if target in PYTHON or (is_of_python and target is not operator.call):
        return PURE
    if module in ("torch", "torch.fx.experimental.sym_node") and name.lstrip("_").startswith("sym_"):
        return PURE
    return Effects(everything=True, barrier="is a Python function, which may write anything")


def is_control_deps(target: object) -> bool:
    """Whether it is inductor's operator that runs a subgraph behind nodes that it does not read."""
    # Told by name, since the operator is defined in a private module of inductor.
    return isinstance(target, torch._ops.HigherOrderOperator) and target.__name__ == "control_deps"


def _higher_order(node: fx.Node, target: torch._ops.HigherOrderOperator) -> Effects:
    """``control_deps`` does what its subgraph does (its dependencies are edges already); any other one is a barrier."""
    inner = _subgraph(node) if is_control_deps(target) else None
    if inner is None:
        return Effects(everything=True, barrier=_SILENT)
    found = [effects_of(n) for n in inner.nodes if n.op not in ("placeholder", "get_attr", "output")]
    flights = {effects.flight for effects in found} - {""}
    # Placeholders of the subgraph are not matched with arguments: one write in it counts as a write to each argument.
    return Effects(
        everything=any(effects.everything or effects.writes for effects in found),
        shares_all=any(effects.shares or effects.shares_all for effects in found),
        flight=flights.pop() if len(flights) == 1 else "",
        random=any(effects.random for effects in found),
        chained=any(effects.chained for effects in found),
        barrier=next((effects.barrier for effects in found if effects.barrier), ""),
    )


def _subgraph(node: fx.Node) -> fx.Graph | None:
    held = node.args[1] if len(node.args) > 1 else None
    if not isinstance(held, torch.fx.Node) or held.op != "get_attr":
        return None
    found = held_by(node.graph.owning_module, str(held.target))
    return found.graph if isinstance(found, torch.fx.GraphModule) else None


KNOWN = frozenset(
    [
        *("aten", "prims", "prim", "rngprims", "quantized", "quantized_decomposed", "_quantized", "mkldnn", "mkl", "onednn"),
        *(*COLLECTIVES, "c10d", "_dtensor", "symm_mem", "fsdp", "bucketing", "inductor", "profiler"),
    ]
)
"""Namespaces whose effects schemas and the tables below tell in full.

An operator of any other namespace is a barrier, unless its schema annotates aliases or it has the tag pt2_compliant_tag.
"""
CHAINED_NAMESPACES = frozenset({"c10d", "symm_mem", "profiler"})
"""Namespaces whose operators act on other ranks, on workspaces or on the profiler, which no schema tells."""
CHAINED = frozenset({"isend", "irecv", "batch_p2p_ops"})
"""Sends and receives are matched by their order."""

SHARES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        [
            *("aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes", "aten::unsafe_chunk"),
            *(
                "aten::to_dense",
                "aten::_saturate_weight_to_fp16",
                "aten::type_as",
                "aten::sum_to_size",
                "aten::data",
                "aten::lift",
                "aten::_coalesce",
                "aten::coalesce",
            ),
            *(f"aten::_cast_{name}" for name in ("Byte", "Char", "Double", "Float", "Int", "Long", "Short", "Half")),
            *("inductor::_alloc_from_pool", "inductor::_reinterpret_tensor"),
        ],
        ("self",),
    ),
    **dict.fromkeys(["aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::native_dropout"], ("input",)),
    **dict.fromkeys(["aten::atleast_1d", "aten::atleast_2d", "aten::atleast_3d"], ("self", "tensors")),
    **dict.fromkeys(
        ["aten::broadcast_tensors", "aten::meshgrid", "aten::flatten_dense_tensors", "aten::_to_cpu"], ("tensors",)
    ),
    **dict.fromkeys(["aten::to_dense_backward", "aten::to_mkldnn_backward"], ("grad",)),
    "aten::unflatten_dense_tensors": ("flat",),
    "prims::device_put": ("a",),
    "_c10d_functional::_wrap_tensor_autograd": ("input",),
    "_c10d_functional::wait_tensor": ("tensor",),
    "c10d_functional::wait_tensor": ("self",),
    "_c10d_functional::isend": ("tensor",),
    "_c10d_functional::irecv": ("tensor",),
    "_c10d_functional::batch_p2p_ops": ("tensors",),
    "c10d_functional::isend": ("self",),
    "c10d_functional::irecv": ("self",),
    "c10d_functional::batch_p2p_ops": ("tensors",),
    "fsdp::all_gather_copy_in": ("all_gather_output",),
    "aten::set_": ("source",),
    "symm_mem::get_remote_tensors": ("x",),
    "symm_mem::_rendezvous": ("tensor",),
}
"""By operator the arguments that its result may share although the schema does not say so."""

_JOINS = frozenset({torch.ops.aten.flatten_dense_tensors.default})
"""Operators that give the only tensor of a list as it is, and several in new memory."""

_STATISTICS = ("running_mean", "running_var")
WRITES: dict[str, tuple[str, ...]] = {
    "aten::_saturate_weight_to_fp16": ("weight",),
    **dict.fromkeys(
        [
            *("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm", "aten::batch_norm"),
            *("aten::_batch_norm_impl_index", "aten::instance_norm", "aten::batch_norm_update_stats"),
            *("aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts"),
        ],
        _STATISTICS,
    ),
    "_c10d_functional::irecv": ("tensor",),
    "_c10d_functional::batch_p2p_ops": ("tensors",),
    "c10d_functional::irecv": ("self",),
    "c10d_functional::batch_p2p_ops": ("tensors",),
    "fsdp::all_gather_copy_in": ("all_gather_output",),
    "inductor::resize_storage_bytes_": ("variable",),
}
"""By operator the arguments that it writes although the schema does not say so."""
TURNED_OFF = ("training", "use_input_stats")
"""Arguments of operators in WRITES: they write no statistics if the argument is False."""
HIDDEN = frozenset({"inductor::accumulate_grad_"})
"""Operators that write what is no argument of theirs."""

PYTHON = frozenset(
    # Tracers leave them in graphs for arithmetic on symbolic sizes.
    getattr(builtins, name)
    for name in ("abs", "bool", "divmod", "float", "int", "len", "max", "min", "pow", "round", "sum")
)
IN_PLACE = frozenset(
    [
        *(operator.iadd, operator.isub, operator.imul, operator.imatmul, operator.itruediv, operator.ifloordiv, operator.imod),
        *(operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.iconcat),
        *(operator.setitem, operator.delitem),
    ]
)
