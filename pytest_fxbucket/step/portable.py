"""Graphs as plain data, sent to ranks and told apart by digests; and copies of one's own.

Only what a graph computes is kept: operators, arguments, constants. Names and metadata are not part of the digest, but names
travel along, since they tell people where two runs part.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from pytest_fxbucket.compat.fake_tensors import FakeTensor
from pytest_fxbucket.compat.inductor_operators import register_inductor_operators
from pytest_fxbucket.errors import PassError

if TYPE_CHECKING:
    from collections.abc import Callable


# Tuples with names, since a graph has thousands: frozen dataclasses with slots are pickled field by field, in Python.


class _Ref(NamedTuple):
    """The node number ``index``."""

    index: int  # type: ignore[assignment]  # hides the tuple's method, which nobody calls; digests have the name


class _Op(NamedTuple):
    """An operator by name; the overload is empty for a packet of overloads, and for an operator of higher order."""

    name: str
    overload: str


@dataclass(frozen=True, slots=True)
class PortableGraph:
    """A graph that can be pickled: a row (op, name, target, args, kwargs) for each node."""

    rows: tuple[tuple[str, str, Any, Any, Any], ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Tensors and graphs that ``get_attr`` nodes name."""
    modules: tuple[str, ...] = ()
    """Python modules to import first: they register the operators that the graph calls."""


def encode(graph: fx.Graph, root: torch.nn.Module, modules: tuple[str, ...] = ()) -> PortableGraph:
    """``graph`` as plain data; its ``get_attr`` nodes name attributes of ``root``.

    Raises :class:`PassError` for what cannot be sent: a call without an importable name, an argument or an attribute that is
    neither number, text, dtype and the like, nor tensor or graph.
    """
    index = {node: i for i, node in enumerate(graph.nodes)}

    def plain(node: fx.Node) -> tuple[Any, Any]:
        try:
            args, kwargs = _mapped((node.args, dict(node.kwargs)), lambda source: _Ref(index[source]))
        except TypeError as error:
            raise PassError(f"{node.name} ({node.target}) has {error} among its arguments, which no rank can be sent") from None
        return args, kwargs

    rows = tuple((node.op, node.name, _target(node), *plain(node)) for node in graph.nodes)
    names = sorted({str(node.target) for node in graph.nodes if node.op == "get_attr"})
    return PortableGraph(rows, {name: _attribute(root, name, modules) for name in names}, modules)


def encode_module(graph_module: fx.GraphModule) -> PortableGraph:
    """``graph_module`` as plain data, of operators that torch itself registers."""
    return encode(graph_module.graph, graph_module)


def decode(portable: PortableGraph) -> fx.GraphModule:
    """The graph again, without metadata."""
    for module in portable.modules:
        importlib.import_module(module)
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for op, name, target, args, kwargs in portable.rows:
        node = graph.create_node(op, _callable(target), name=name)
        # Not by create_node, which looks through them for symbols: a fifth of all decoding, and there are none.
        node.args = _mapped(args, lambda ref: nodes[ref.index])
        node.kwargs = _mapped(kwargs, lambda ref: nodes[ref.index])
        nodes.append(node)
    root = torch.nn.Module()
    fill(root, portable.attributes)
    return fx.GraphModule(root, graph)


def fill(root: torch.nn.Module, attributes: Mapping[str, Any]) -> None:
    """Give ``root`` the attributes of a portable graph, in place of what it has by these names."""
    for name, value in attributes.items():
        *path, last = name.split(".")
        holder = root
        for part in path:
            if not hasattr(holder, part):
                holder.add_module(part, torch.nn.Module())
            holder = getattr(holder, part)
        if hasattr(holder, last):  # a parameter and a graph would take only their like in their place
            delattr(holder, last)
        setattr(holder, last, decode(value) if isinstance(value, PortableGraph) else value)


def digest(portable: PortableGraph) -> str:
    """Hex digest of what the graph computes; equal on every rank, machine and hash seed for equal graphs."""
    text = hashlib.sha256()
    for op, _, target, args, kwargs in portable.rows:
        shown = target if op == "call_function" else "" if op == "placeholder" else str(target)
        called = f"{shown.__module__}.{shown.__qualname__}" if callable(shown) else repr(shown)
        text.update(repr((op, called, args, sorted(kwargs.items()))).encode())
    for name in sorted(portable.attributes):
        value = portable.attributes[name]
        text.update(name.encode())
        is_graph = isinstance(value, PortableGraph)
        text.update(digest(value).encode() if is_graph else repr((value.dtype, tuple(value.shape))).encode() + raw_bytes(value))
    return text.hexdigest()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's elements as they lie in memory of this machine, in logical order."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()  # ``contiguous`` alone leaves both to readers
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""


def _target(node: fx.Node) -> Any:
    if node.op == "call_module":
        raise PassError(f"{node.name} calls the submodule {node.target}, which no rank can be sent; trace through it")
    if node.op != "call_function":
        return node.target
    return _operator(node.target) or _function(node)


def _operator(target: Any) -> _Op | None:
    if isinstance(target, torch._ops.OpOverload):
        return _Op(target._schema.name, target._overloadname)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return _Op(str(target._qualified_op_name), "")
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _Op(f"{target.namespace}::{target.__name__}", "")
    return None


def _function(node: fx.Node) -> Any:
    target: Any = node.target
    name = getattr(target, "__qualname__", "")
    if "<locals>" in name:
        raise PassError(f"{node.name} calls {name}, a function inside a function, which no rank can import")
    # A rank imports it by module and name, so these must lead back to the same object.
    found: Any = sys.modules.get(getattr(target, "__module__", None) or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not target:
        raise PassError(f"{node.name} calls {name or target}, which no rank can import by that name")
    return target


def _callable(target: Any) -> Any:
    if not isinstance(target, _Op):
        return target
    namespace, name = target.name.split("::")
    if namespace == "fxbucket":
        # Operators of our own are registered when these modules are imported.
        own = "compat.fx" if name == "after" else "capture.override.calls"
        importlib.import_module(f"pytest_fxbucket.{own}")
    if namespace == "prims" and not hasattr(torch.ops.prims, name):
        register_inductor_operators()
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, target.overload) if target.overload else packet


def _attribute(root: torch.nn.Module, name: str, modules: tuple[str, ...]) -> Any:
    value = attrgetter(name)(root)
    if isinstance(value, fx.GraphModule):
        return encode(value.graph, value, modules)
    if not isinstance(value, torch.Tensor):
        raise PassError(f"attribute {name} is of type {type(value).__name__}, which no rank can be sent")
    return value


_PLAIN = frozenset(
    {type(None), type(...), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
)


def _mapped(value: Any, node: Callable[[Any], Any]) -> Any:
    """``value`` with nodes, operators and references replaced, containers as plain lists, tuples and dicts.

    Raises TypeError for what has no value that can be sent and compared.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (fx.Node, _Ref)):
        return node(value)
    if isinstance(value, _Op):
        return _callable(value)
    if isinstance(value, tuple):
        return tuple(_mapped(item, node) for item in value)
    if isinstance(value, list):
        return [_mapped(item, node) for item in value]
    if isinstance(value, dict):
        return {key: _mapped(item, node) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(_mapped(value.start, node), _mapped(value.stop, node), _mapped(value.step, node))
    operator = _operator(value)
    if operator is None and not isinstance(value, (Enum, type)):
        raise TypeError(f"a value of type {type(value).__name__}")
    return operator or value


# A graph module of one's own: nothing that is done to it, in place too, reaches the one that it was copied from.


def own_copy(module: fx.GraphModule) -> fx.GraphModule:
    """``module`` with a graph, constants and graphs within it of its own; nodes have the same names and fake values."""
    made = fx.GraphModule(module, copy.deepcopy(module.graph))
    for node in made.graph.nodes:
        # Stacks of modules and notes may be changed in place, and deepcopy has taken them over.
        node.meta = {key: copy.copy(value) if isinstance(value, (dict, list)) else value for key, value in node.meta.items()}
    # GraphModule has taken the attributes over as they are.
    memo: dict[int, Any] = {}
    for name in dict.fromkeys(str(node.target) for node in made.graph.nodes if node.op == "get_attr"):
        *path, last = name.split(".")
        holder: Any = made
        for part in path:
            holder = getattr(holder, part)
        if isinstance(held := getattr(holder, last), (torch.Tensor, fx.GraphModule)):
            setattr(holder, last, _copied(held, memo))
    return made


def _copied(held: Any, memo: dict[int, Any]) -> Any:
    """A copy of a constant or graph. Constants that share memory do so in the copy; a fake tensor has nothing to be changed."""
    if isinstance(held, fx.GraphModule):
        return own_copy(held)
    if isinstance(held, FakeTensor):
        return held
    # deepcopy refuses tensors that autograd has made.
    return copy.deepcopy(held if held.is_leaf else held.detach(), memo)
