"""New nodes with their metadata, what they hold as fake tensors put together by hand, and where they come from."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.c10d import without_dispatch_modes
from pytest_fxbucket.compat.fake_tensors import FakeTensor, FakeTensorMode, python_kernels
from pytest_fxbucket.compat.fx import made_of
from pytest_fxbucket.errors import PassError

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.targets import MergeTarget

Shape = Sequence[int]


def fake_value(node: fx.Node) -> FakeTensor:
    """The fake tensor that ``node`` carries; raises :class:`PassError` if it carries none."""
    value = node.meta.get("val")
    if not isinstance(value, FakeTensor):
        what = "no value" if value is None else f"a {type(value).__name__}"
        raise PassError(f"{node.name} carries {what}, and merging needs a fake tensor in its meta['val']")
    return value


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Let the operator's argument ``name`` be ``value``."""
    target: Any = node.target
    place = [one.name for one in target._schema.arguments].index(name)
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)


def fresh(mode: FakeTensorMode, shape: Shape, dtype: torch.dtype, device: torch.device) -> FakeTensor:
    """A contiguous fake tensor in a storage of its own."""
    with without_dispatch_modes():
        return FakeTensor(mode, torch.empty(tuple(shape), dtype=dtype, device="meta"), device)


def view_of(value: FakeTensor, shape: Shape, dtype: torch.dtype | None = None) -> FakeTensor:
    """A contiguous view in ``value``'s storage, from the first element of ``value`` on."""
    dtype = dtype or value.dtype
    start = int(value.storage_offset()) * value.dtype.itemsize // dtype.itemsize
    return _strided(value, value.fake_mode, dtype, start, tuple(shape), _contiguous_strides(shape))


def narrowed(value: FakeTensor, dim: int, begin: int, size: int) -> FakeTensor:
    """The ``size`` elements of ``value`` from ``begin`` on along ``dim``, in its storage."""
    start = int(value.storage_offset()) + begin * int(value.stride(dim))
    shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
    return _strided(value, value.fake_mode, value.dtype, start, shape, value.stride())


def alone(value: FakeTensor) -> bool:
    """Whether ``value`` is contiguous, and all that its storage holds."""
    return (
        has_numbers(value)
        and value.is_contiguous()
        and value.storage_offset() == 0
        and value.untyped_storage().nbytes() == value.numel() * value.dtype.itemsize
    )


def has_numbers(value: torch.Tensor) -> bool:
    """Whether no size of ``value`` is symbolic, nor its storage offset, as behind a tensor of a symbolic size."""
    return all(isinstance(size, int) for size in (*value.shape, value.storage_offset()))


def moved(mode: FakeTensorMode, value: FakeTensor) -> FakeTensor:
    """``value`` as a fake tensor of ``mode``. A graph traced with real tensors has another mode for each node."""
    if value.fake_mode is mode:
        return value
    return _strided(value, mode, value.dtype, int(value.storage_offset()), tuple(value.shape), value.stride())


def _strided(
    value: FakeTensor, mode: FakeTensorMode, dtype: torch.dtype, offset: int, shape: tuple[int, ...], strides: Shape
) -> FakeTensor:
    # As a view operator under ``mode`` would give it, without the cost of dispatching one: a meta tensor on the same storage.
    storage = value.untyped_storage()
    with without_dispatch_modes():
        meta = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, shape, tuple(strides))
        return FakeTensor(mode, meta, value.device)


def _contiguous_strides(shape: Shape) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        # As torch has it, a dimension without elements counts as one.
        strides[dim - 1] = strides[dim] * max(shape[dim], 1)
    return tuple(strides)


# What a new node holds (``meta["val"]``), as a fake tensor.
#
# Calling an operator under a fake mode costs some hundred microseconds. For the operators that packs are made of, and sizes
# that are numbers, the value is put together by hand; everything else is called.


def value_of(mode: FakeTensorMode, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``target`` gives for arguments that hold fake tensors; raises :class:`PassError` if it cannot be called on them."""
    if target is getitem and isinstance(args[0], (list, tuple)):
        return args[0][args[1]]  # the very tensor that the list holds
    value = _known(mode, target, args, kwargs)
    return _called(mode, target, args, kwargs) if value is None else value


def _known(mode: FakeTensorMode, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The value by hand; None if it is not known."""
    quick = _QUICK.get(str(target))
    if quick is None or not set(kwargs) <= {"dtype", "memory_format"} or not all(isinstance(n, int) for n in _sizes(args)):
        return None
    try:
        return quick(mode, *args, **kwargs)
    except (TypeError, AttributeError, IndexError):  # the operator says better what is wrong with its arguments
        return None


def _called(mode: FakeTensorMode, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operator itself, run under ``mode``; what it asks of symbolic sizes is not kept as a guard."""
    from pytest_fxbucket.compat.pytree import tree_map

    args, kwargs = tree_map(lambda a: moved(mode, a) if isinstance(a, FakeTensor) else a, (tuple(args), dict(kwargs)))
    unguarded = mode.shape_env.suppress_guards() if mode.shape_env is not None else nullcontext()
    try:
        with unguarded, python_kernels(), mode:
            return target(*args, **kwargs)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise PassError(f"{target} cannot be called on what the launches carry: {type(error).__name__}: {reason}") from error


def _sizes(args: Sequence[Any]) -> Iterator[Any]:
    """All numbers among ``args``, and of tensors among them all sizes, and where they begin."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield from (*arg.shape, arg.storage_offset())
        elif isinstance(arg, (list, tuple)):
            yield from _sizes(arg)
        elif isinstance(arg, (int, torch.SymInt)):
            yield arg


# What each operator gives; None leaves it to the operator itself, which may refuse.


def _joined(mode: FakeTensorMode, tensors: Sequence[FakeTensor], dim: int = 0) -> FakeTensor | None:
    first = tensors[0]
    shapes = {(*t.shape[:dim], *t.shape[dim + 1 :]) for t in tensors}
    # cat promotes several dtypes, and passes over empty vectors among matrices: both are left to the operator.
    if not 0 <= dim < first.dim() <= 2 or len(shapes) > 1 or len({(t.dim(), t.dtype) for t in tensors}) > 1:
        return None
    shape = [*first.shape[:dim], sum(t.shape[dim] for t in tensors), *first.shape[dim + 1 :]]
    return fresh(mode, shape, first.dtype, first.device)


def _gathered(mode: FakeTensorMode, value: FakeTensor, ranks: int, group: str) -> FakeTensor | None:
    return fresh(mode, [value.shape[0] * ranks, *value.shape[1:]], value.dtype, value.device) if value.dim() else None


def _scattered(mode: FakeTensorMode, value: FakeTensor, op: str, ranks: int, group: str) -> FakeTensor | None:
    if not value.dim() or value.shape[0] % ranks:
        return None
    return fresh(mode, [value.shape[0] // ranks, *value.shape[1:]], value.dtype, value.device)


def _like(mode: FakeTensorMode, value: FakeTensor, *others: str) -> FakeTensor | None:
    return fresh(mode, value.shape, value.dtype, value.device) if value.is_contiguous() else None


def _viewed(mode: FakeTensorMode, value: FakeTensor, shape: Sequence[int]) -> FakeTensor | None:
    known, numel = math.prod(size for size in shape if size != -1), value.numel()
    shape = [numel // max(known, 1) if size == -1 else size for size in shape]
    return view_of(value, shape) if value.is_contiguous() and math.prod(shape) == numel else None


def _retyped(mode: FakeTensorMode, value: FakeTensor, dtype: torch.dtype) -> FakeTensor | None:
    if value.dim() != 1:
        return None
    size = value.shape[0] * value.dtype.itemsize
    begin = int(value.storage_offset()) * value.dtype.itemsize
    if not value.is_contiguous() or size % dtype.itemsize or begin % dtype.itemsize:
        return None
    return view_of(value, [size // dtype.itemsize], dtype)


def _split(mode: FakeTensorMode, value: FakeTensor, sizes: Sequence[int], dim: int = 0) -> list[FakeTensor] | None:
    if not 0 <= dim < value.dim() or sum(sizes) != value.shape[dim]:
        return None
    return [narrowed(value, dim, end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _cloned(mode: FakeTensorMode, value: FakeTensor, memory_format: torch.memory_format) -> FakeTensor | None:
    if memory_format != torch.contiguous_format:
        return None
    return fresh(mode, value.shape, value.dtype, value.device)


def _cast(mode: FakeTensorMode, value: FakeTensor, dtype: torch.dtype) -> FakeTensor | None:
    return fresh(mode, value.shape, dtype, value.device) if value.is_contiguous() else None


# Makes new nodes with their metadata and fake values, and arithmetic on sizes that may be symbolic.


_QUICK: dict[str, Callable[..., Any]] = {
    "aten.cat.default": _joined,
    "aten.clone.default": _cloned,
    "aten.view.default": _viewed,
    "aten.reshape.default": _viewed,
    "aten.view.dtype": _retyped,
    "aten.split_with_sizes.default": _split,
    "aten._to_copy.default": _cast,
    "prims.convert_element_type.default": _cast,
    "_c10d_functional.all_gather_into_tensor.default": _gathered,
    "_c10d_functional.reduce_scatter_tensor.default": _scattered,
    "_c10d_functional.all_reduce.default": _like,
    "_c10d_functional.wait_tensor.default": _like,
}


class NodeMaker:
    """Makes nodes at the graph's insertion point, one behind the other.

    ``make(target, *args, **kwargs)`` gives the node that calls ``target``; arguments may be nodes, and lists of nodes.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, meta: dict[str, Any]) -> None:
        self._graph, self._mode, self._meta = graph, mode, meta
        self._made: list[fx.Node] = []
        self._sizes: dict[tuple[object, ...], fx.Node] = {}

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """The node that calls ``target``; raises :class:`PassError` if it cannot be called on such values."""
        values = [_value(arg) for arg in args]
        keywords = {name: _value(arg) for name, arg in kwargs.items()}
        return self.holding(value_of(self._mode, target, values, keywords), target, *args, **kwargs)

    def holding(self, value: Any, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """The node that calls ``target``, whose fake value is known to be ``value``."""
        # Named as tracers name what they trace. Arguments are set afterwards: given to create_node, they would be walked in
        # Python, which takes as long again.
        node = self._graph.create_node("call_function", target, name=_name_of(target))
        node.args = args
        if kwargs:
            node.kwargs = kwargs
        node.meta.update(self._meta, val=value)  # setting meta itself takes the node out of the graph's table and back
        self._made.append(node)
        return node

    def size(self, tensor: fx.Node, dim: int) -> int | fx.Node:
        """Size of ``tensor`` along ``dim``."""
        value = fake_value(tensor).shape[dim]
        return value if isinstance(value, int) else self._size(value, torch.ops.aten.sym_size.int, tensor, dim)

    def numel(self, tensor: fx.Node) -> int | fx.Node:
        """Elements of ``tensor``."""
        value = fake_value(tensor).numel()
        return value if isinstance(value, int) else self._size(value, torch.ops.aten.sym_numel.default, tensor)

    def times(self, size: int | fx.Node, factor: int) -> int | fx.Node:
        """``size * factor``."""
        return self._computed(operator.mul, size, factor)

    def over(self, size: int | fx.Node, divisor: int) -> int | fx.Node:
        """``size // divisor``."""
        return self._computed(operator.floordiv, size, divisor)

    def missing(self, size: int | fx.Node, unit: int) -> int | fx.Node:
        """What ``size`` lacks to the next multiple of ``unit``."""
        # Python's remainder is never negative: of -size it is what is missing.
        return self._computed(operator.mod, self._computed(operator.mul, size, -1), unit)

    def taken(self) -> tuple[fx.Node, ...]:
        """Nodes made since this was asked last, in order."""
        made, self._made = tuple(self._made), []
        return made

    def _computed(self, function: Callable[[Any, Any], Any], size: int | fx.Node, number: int) -> int | fx.Node:
        if isinstance(size, int):
            return int(function(size, number))
        return self._size(function(size.meta["val"], number), function, size, number)

    def _size(self, value: object, target: Callable[..., Any], *args: Any) -> fx.Node:
        """One node for one size, however often it is asked for."""
        key = (target, *args)
        if key not in self._sizes:
            self._sizes[key] = self.holding(value, target, *args)
        return self._sizes[key]


def _name_of(target: Callable[..., Any]) -> str:
    """``all_gather_into_tensor`` of any overload of it."""
    packet = getattr(target, "overloadpacket", target)
    return str(packet.__name__)


def _value(argument: Any) -> Any:
    if isinstance(argument, torch.fx.Node):
        return argument.meta["val"]
    return [_value(item) for item in argument] if isinstance(argument, (list, tuple)) else argument


# What the nodes that the pass makes say of themselves: the entry, and all that went into them.
#
# torch's keys for a node's module and line of code have room for one node. They get what the first member says that says
# anything, as in torch's own bucketing. What all members say is beside them, in lists.


ENTRY, SOURCES, LAUNCHES = "fxbucket_entry", "fxbucket_sources", "fxbucket_launches"
OF_ONE = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "custom")
"""torch's keys that have room for one node; what all members say is under ``bucketing_<key>_sources``."""


def shared_meta(members: Sequence[MergeTarget]) -> dict[str, Any]:
    """Metadata of a node made for ``members``: entry, FQNs in byte order, names of the launches that were there before."""
    first, launches = members[0], [member.launch for member in members]
    meta: dict[str, Any] = {
        **_of_torch(launches),
        ENTRY: first.entry,
        SOURCES: tuple(fqn for member in members for fqn in member.fqns),
        LAUNCHES: tuple(name for launch in launches for name in launch.meta.get(LAUNCHES, (launch.name,))),
    }
    if first.direction == "backward":
        meta["autograd_backward"] = True
    return meta


def sources_key(key: str) -> str:
    """Key under which a merged node has the list of what its members said under ``key``."""
    return f"bucketing_{key}_sources"


def _of_torch(launches: Sequence[fx.Node]) -> dict[str, Any]:
    """What torch's bucketing writes, under the same names."""
    # Like there, each stack trace is listed once, and other keys have an item for each member that has them.
    meta: dict[str, Any] = {}
    for key in OF_ONE:
        said = [launch.meta[key] for launch in launches if launch.meta.get(key)]
        if said:
            meta[key] = said[0]
            meta[sources_key(key)] = list(dict.fromkeys(said)) if key == "stack_trace" else said
    meta["from_node"] = [made_of(launch, "bucketing") for launch in launches]
    return meta
