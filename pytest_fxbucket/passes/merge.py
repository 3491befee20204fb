"""Puts the launches of each bucket together: one launch and one wait in the place of many, everything else where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.c10d import c10d_functional
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph.ops import dtype_name, is_view, operator_name, returns_written
from pytest_fxbucket.graph.walks import reached
from pytest_fxbucket.passes.arrange import arranged, drawn, drawn_together, pull_up, relink
from pytest_fxbucket.passes.bucketer import packer_for
from pytest_fxbucket.passes.carried import launches_before
from pytest_fxbucket.passes.new_nodes import NodeMaker, alone, fake_value, has_numbers, shared_meta
from pytest_fxbucket.passes.packers import PACKERS, Packing, packer_named

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.compat.fake_tensors import FakeTensor
    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.passes.bucketer import Bucketer
    from pytest_fxbucket.passes.grouping import Group
    from pytest_fxbucket.passes.packers import Packer, Unpack
    from pytest_fxbucket.passes.targets import LaunchTensor, MergeTarget


@dataclass(frozen=True, slots=True)
class Merged:
    """A bucket in the graph: one launch, its waits (one, unless the launch stayed as it was), members in byte order."""

    launch: fx.Node
    waits: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    """The unpacked results, one for each part of each member."""
    members: tuple[MergeTarget, ...]
    pack: tuple[fx.Node, ...] = ()
    """What was made before the launch, in order."""
    unpack: tuple[fx.Node, ...] = ()
    """What was made behind its wait, in order."""
    absorbed: tuple[fx.Node, ...] = ()
    """Casts of the members' inputs that the pack does now; nobody else read them."""
    behind: int = 0
    """Launches before it on the way of its data, in the graph where all buckets are merged."""

    @property
    def first(self) -> MergeTarget:
        """Any member: they agree in entry, direction, kind, group and op."""
        return self.members[0]

    @property
    def level(self) -> int:
        """Number of reductions that its members went through before, or that buckets of other members make of that now."""
        return max(self.behind, *(member.level for member in self.members))


def merge(graph: fx.Graph, order: Order, groups: Sequence[Group], bucketer: Bucketer) -> list[Merged]:
    """Merge each of ``groups`` that has several launches. ``order`` is of ``graph`` as it is; members must be independent.

    A merged all-gather stands where its first member stood, with what it needs; a merged reduction where its last one did. If a
    bucket cannot be built (:class:`PassError`, :class:`PlanError`), ``graph`` is as it was.
    """
    # The new order is found on the old nodes, before any new node exists: the launches of a bucket count as one item, its waits
    # as another, and the items are sorted. Then each bucket's nodes are made at the end of the graph, readers are led to them,
    # the old nodes are erased, and ``relink`` puts the new ones where their item stands.
    edges = drawn_together(order.before, drawn(order, groups))
    merging = [group for group in groups if len(group) > 1]
    items = arranged(edges, _wished_places(order, merging))
    made: dict[int, list[fx.Node]] = {}
    try:
        packed = {id(group): _build(graph, order, group, packer_for(bucketer, group), made) for group in merging}
    except BaseException:
        # No old node has been changed yet, so without the new ones the graph is as it was.
        for node in [node for node in reversed(graph.nodes) if node not in order.index]:
            graph.erase_node(node)
        raise
    _replace({wait: result for group in merging for wait, result in _results(group, packed[id(group)])})
    gone = {node for group in merging for node in _gone(group, packed[id(group)])}
    # From the last to the first: fx erases no node that still has a reader.
    for node in sorted(gone, key=order.index.__getitem__, reverse=True):
        graph.erase_node(node)
    relink(graph, [node for item in items for node in made.get(item, [order.nodes[item]]) if node not in gone])
    behind = launches_before(graph)
    buckets = (packed.get(id(group)) or _alone(group) for group in groups)
    return [replace(bucket, behind=behind.get(bucket.launch, 0)) for bucket in buckets]


def _wished_places(order: Order, merging: Sequence[Group]) -> list[float]:
    """Where each node, and each bucket's launch and wait (by their first node), wishes to stand."""
    # A gather goes up to its first member, whose readers come first, and takes the packing of the others with it. A reduction
    # goes down to its last member, where the last gradient is there.
    wishes = [float(index) for index in range(len(order.nodes))]
    for group in merging:
        launches = sorted(order.index[target.launch] for target in group)
        if group[0].kind == "all_gather":
            pull_up(order, wishes, launches, launches[0])
        else:
            # The first launch is the item that stands for the whole bucket.
            wishes[launches[0]] = launches[-1]
    return wishes


def _build(graph: fx.Graph, order: Order, group: Group, packer: str | Packer, made: dict[int, list[fx.Node]]) -> Merged:
    """Make the bucket's nodes; ``made`` says what stands in the place of its launches, and of its waits."""

    def foldable(cast: fx.Node) -> bool:
        # The order holds the cast before or behind a write of its source, not the pack, which would read the source instead.
        return not any(order.writing(source) for source in cast.all_input_nodes)

    with graph.inserting_before(graph.output_node()):
        packed = build(graph, group, packer=packer, foldable=foldable)
    made[min(order.index[target.launch] for target in group)] = [*packed.pack, packed.launch]
    made[min(order.index[wait] for target in group for wait in target.waits)] = [*packed.waits, *packed.unpack]
    return packed


def _results(group: Group, packed: Merged) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(wait, the node that its readers read instead) of all waits of ``group``."""
    parts = (part for target in group for part in target.parts)
    for part, result in zip(parts, packed.results, strict=True):
        for wait in part.waits:
            yield wait, result


def _replace(results: Mapping[fx.Node, fx.Node]) -> None:
    """Let the readers of each key read its value. Each reader once: the output may read thousands."""

    def result(node: fx.Node) -> fx.Node:
        return results.get(node, node)

    for reader in dict.fromkeys(reader for wait in results for reader in wait.users):
        reader.args = torch.fx.map_arg(reader.args, result)
        if reader.kwargs:
            reader.kwargs = torch.fx.map_arg(reader.kwargs, result)


def _gone(group: Group, packed: Merged) -> list[fx.Node]:
    nodes = [node for target in group for node in (*target.waits, *target.dropped, target.launch)]
    return [*nodes, *packed.absorbed]


def _alone(group: Group) -> Merged:
    """The one launch of ``group``, as it is."""
    waits = tuple(group[0].waits)
    return Merged(group[0].launch, waits, waits, group)


# Builds one merged launch out of several: pack, launch, wait, unpack. The same nodes on every rank.


def build(
    graph: fx.Graph, members: tuple[MergeTarget, ...], *, packer: str | Packer = "default", foldable: Callable[[fx.Node], bool]
) -> Merged:
    """Create the nodes of one launch for all ``members`` at the graph's insertion point; nothing is replaced or erased.

    ``members`` agree in kind, op, group and device, and in dtype unless they are gathered. ``packer`` is one, or as
    :func:`~pytest_fxbucket.passes.packers.packer_named` takes it. ``foldable(cast)`` says whether a cast that stands before a
    launch may be done by the pack instead, which only the registered packers are asked to.

    Raises :class:`PassError` for values that are not fake and for a packer that does not do its work, :class:`PlanError` for a
    packer that is not known.
    """
    parts = [part for member in members for part in member.parts]
    cast = (
        folded([p.input for p in parts], [m.launch for m in members], foldable)
        if isinstance(packer, str) and packer in PACKERS
        else None
    )
    inputs = tuple(cast.sources) if cast else tuple(part.input for part in parts)
    make = NodeMaker(graph, fake_value(inputs[0]).fake_mode, shared_meta(members))
    bucket = _bucket(make, members[0], inputs, parts)
    name = f'packer "{packer}"' if isinstance(packer, str) else f"packer {getattr(packer, '__qualname__', packer)}"
    asked = packer_named(packer) if isinstance(packer, str) else packer
    packed, unpack = _pair(name, _call_packer(name, asked, make, bucket))
    packed = cast.apply(make, packed) if cast else packed
    pack = make.taken()
    launch, wait = _launched(make, members[0], packed)
    make.taken()  # the launch and its wait: neither pack nor unpack
    results = _checked(name, _call_packer(name, unpack, wait), parts, bucket)
    results = [_in_own_storage(make, result, part) for result, part in zip(results, parts, strict=True)]
    # Views of the old wait carry fake values in that wait's fake storage. The result takes over the wait's fake value, so that
    # whoever tells aliases by fake storages still sees that these views share memory with it.
    for result, value in zip(results, bucket.replaced, strict=True):
        if result.meta["val"] is not value and has_numbers(value) and value.is_contiguous():
            result.meta["val"] = value
    return Merged(launch, (wait,), tuple(results), members, pack, make.taken(), cast.casts if cast else ())


def _bucket(make: NodeMaker, first: MergeTarget, inputs: tuple[fx.Node, ...], parts: Sequence[LaunchTensor]) -> Packing:
    """What the packer is told.

    Nodes of symbolic sizes are made here, before the launch: behind its wait they would keep its inputs alive until then.
    """
    numels = [make.numel(node) for node in inputs]
    shapes = [[make.size(node, dim) for dim in range(fake_value(node).dim())] for node in inputs]
    if first.kind == "all_gather":
        shapes = [[make.times(shape[0], first.ranks), *shape[1:]] for shape in shapes]
    elif first.kind == "reduce_scatter":
        numels = [make.over(numel, first.ranks) for numel in numels]
        shapes = [[make.over(shape[0], first.ranks), *shape[1:]] for shape in shapes]
    return Packing(
        kind=first.kind,
        ranks=first.ranks,
        inputs=inputs,
        dtypes=tuple(fake_value(node).dtype for node in inputs),
        numels=tuple(numels),
        shapes=tuple(tuple(shape) for shape in shapes),
        replaced=tuple(fake_value(part.waits[0]) for part in parts),
    )


def _launched(make: NodeMaker, first: MergeTarget, packed: fx.Node) -> tuple[fx.Node, fx.Node]:
    c10d = c10d_functional()
    if first.kind == "all_gather":
        launch = make(c10d.all_gather_into_tensor.default, packed, first.ranks, first.group)
    elif first.kind == "reduce_scatter":
        launch = make(c10d.reduce_scatter_tensor.default, packed, first.op, first.ranks, first.group)
    else:
        launch = make(c10d.all_reduce.default, packed, first.op, first.group)
    return launch, make(c10d.wait_tensor.default, launch)


def _call_packer(packer: str, function: Callable[..., Any], *args: Any) -> Any:
    """What ``function`` of the packer gives; raises :class:`PassError` that names it for whatever it raises."""
    try:
        return function(*args)
    except PassError as error:
        raise PassError(f"{packer}: {error}") from error
    except Exception as error:
        raise PassError(f"{packer} raised {type(error).__name__}: {error}") from error


def _pair(packer: str, given: Any) -> tuple[fx.Node, Unpack]:
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], torch.fx.Node) and callable(given[1]):
        _call_packer(packer, fake_value, given[0])
        return given
    raise PassError(f"{packer} gave a {type(given).__name__}, where (packed node, unpack) was expected")


def _checked(packer: str, results: Any, parts: Sequence[LaunchTensor], bucket: Packing) -> list[fx.Node]:
    """``results``, if they are what the waits were; raises :class:`PassError` that names ``packer`` if not."""
    if not isinstance(results, (list, tuple)):
        raise PassError(f"{packer}: unpack gave a {type(results).__name__}, where a list of nodes was expected")
    if odd := [one for one in results if not isinstance(one, torch.fx.Node)]:
        raise PassError(f"{packer}: unpack gave {type(odd[0]).__name__} in its list, where nodes were expected")
    if len(results) != len(parts):
        raise PassError(f"{packer} gave {len(results)} results for {len(parts)} inputs")
    for result, part, wanted in zip(results, parts, bucket.replaced, strict=True):
        value = _call_packer(packer, fake_value, result)
        strided = "" if not has_numbers(value) or value.is_contiguous() else ", not contiguous"
        if (_sizes(value), value.dtype) != (_sizes(wanted), wanted.dtype) or strided:
            raise PassError(
                f"{packer} made {_words(value)}{strided}, for {part.input.name}, where {_words(wanted)} was expected"
            )
    return list(results)


def _in_own_storage(make: NodeMaker, result: fx.Node, part: LaunchTensor) -> fx.Node:
    """``result``, or a copy of it if it lies in a larger storage and one of its readers would notice that."""
    if alone(fake_value(result)) or not any(need_own_storage(wait) for wait in part.waits):
        return result
    return make(torch.ops.aten.clone.default, result, memory_format=torch.contiguous_format)


def _sizes(value: FakeTensor) -> list[Any]:
    """Shape of ``value``; symbolic sizes are all alike, since telling them apart would ask for guards."""
    return [size if isinstance(size, int) else "symbolic" for size in value.shape]


def _words(value: FakeTensor) -> str:
    return f"{dtype_name(value.dtype)}{list(value.shape)}"


# Casts that every member passes before its launch: one cast of the packed tensor does the same, element by element.


@dataclass(frozen=True, slots=True)
class FoldedCasts:
    """The casts of a bucket's members."""

    casts: tuple[fx.Node, ...]
    """Each once, though several members may send the same one."""
    sources: tuple[fx.Node, ...]
    """Input of each member's cast."""
    dtype: torch.dtype

    def apply(self, make: NodeMaker, packed: fx.Node) -> fx.Node:
        """The cast of ``packed``, by the operator that the first member was cast with."""
        target: Any = self.casts[0].target
        if operator_name(self.casts[0]) == "prims::convert_element_type":
            return make(target, packed, self.dtype)
        return make(target, packed, dtype=self.dtype)


def folded(inputs: Sequence[fx.Node], launches: Sequence[fx.Node], foldable: Callable[[fx.Node], bool]) -> FoldedCasts | None:
    """The casts ``inputs``, if the pack can do them; else None. All must cast from one dtype to one, and only for ``launches``.

    Casts between floating dtypes only: what a cast to an integer gives for a number that does not fit may depend on where an
    element lies.
    """
    casts = tuple(dict.fromkeys(inputs))
    if not casts or not all(_is_cast(cast) and set(cast.users) <= set(launches) and foldable(cast) for cast in casts):
        return None
    dtypes = {(_source(cast).dtype, fake_value(cast).dtype) for cast in casts}
    if len(dtypes) > 1:
        return None
    return FoldedCasts(casts, tuple(cast.all_input_nodes[0] for cast in inputs), dtypes.pop()[1])


def _is_cast(node: fx.Node) -> bool:
    """Whether ``node`` casts a floating tensor to another floating dtype, and does nothing else that matters to a pack."""
    if operator_name(node) == "prims::convert_element_type":
        plain = not node.kwargs
    elif operator_name(node) == "aten::_to_copy":
        plain = len(node.args) == 1 and all(_is_plain(node, *item) for item in node.kwargs.items())
    else:
        return False
    return plain and len(node.all_input_nodes) == 1 and _floats(node)


def _floats(node: fx.Node) -> bool:
    source, target = _source(node).dtype, fake_value(node).dtype
    return source.is_floating_point and target.is_floating_point


def _is_plain(node: fx.Node, name: str, value: Any) -> bool:
    """Whether the argument says nothing but the dtype; the order of elements in memory does not matter to a pack."""
    if name in ("dtype", "memory_format") or value is None or value is False:
        return True
    source = _source(node)
    if name == "device":
        return torch.device(value) == source.device
    return name == "non_blocking" or (name == "layout" and value == source.layout)


def _source(node: fx.Node) -> torch.Tensor:
    return fake_value(node.all_input_nodes[0])


# Which results must lie in a storage of their own, because somebody asks where they lie in it.


_READERS = frozenset(
    {
        *(f"aten::as_strided{form}" for form in ("", "_", "_copy", "_scatter")),
        *(f"aten::{name}" for name in ("set_", "resize_", "resize_as_", "storage_offset", "sym_storage_offset")),
        "aten::view_as_complex",
        "inductor::resize_storage_bytes_",
    }
)
"""Operators that count from the storage's beginning, change its size, or ask for an aligned offset."""


def need_own_storage(node: fx.Node) -> bool:
    """Whether an operator that reads ``node``'s result, or a view of it, would notice that it lies in a larger storage."""
    through = reached([node], lambda current: filter(_shares, current.users))
    return any(_asks(user) for current in through for user in current.users)


def _asks(node: fx.Node) -> bool:
    # Of aten::view only this overload asks: for an offset that is aligned for the new dtype.
    return operator_name(node) in _READERS or node.target is torch.ops.aten.view.dtype


def _shares(node: fx.Node) -> bool:
    """Whether ``node``'s result may lie in the storage of one of its inputs."""
    return node.target is getitem or is_view(node) or returns_written(node)
