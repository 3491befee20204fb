"""What operators on values ask of a graph: what goes in and out, which nodes could stand for each other, who reads what,
and what is written in place."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx.node import map_arg

from pytest_fxbucket.graph.collectives import communicates
from pytest_fxbucket.graph.effects import effects_of, written_arguments
from pytest_fxbucket.graph.ops import operator_name, overload, returned, returns_written
from pytest_fxbucket.mutate.operator import Site

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph
    from pytest_fxbucket.step.roles import Role, Value

CASTS = ("aten::_to_copy", "prims::convert_element_type")
_SAME_VALUE = ("aten::detach", "aten::alias")


class Result(NamedTuple):
    """One output of a graph."""

    place: int
    node: fx.Node
    value: Value


def results(seen: SeenGraph, *roles: Role) -> list[Result]:
    """The outputs in one of ``roles``."""
    given = zip(returned(seen.graph.output_node()), seen.outputs, strict=True)
    found = [Result(place, node, value) for place, (node, value) in enumerate(given) if value.role in roles]
    # A graph can return constants, too, such as None.
    return [one for one in found if isinstance(one.node, torch.fx.Node)]


def inputs(seen: SeenGraph, *roles: Role) -> dict[str, fx.Node]:
    """Placeholders in one of ``roles``, by FQN."""
    given = zip(seen.graph.find_nodes(op="placeholder"), seen.inputs, strict=True)
    return {value.fqn: node for node, value in given if value.role in roles}


def tensor(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor that ``node`` holds, if it holds one."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def interchangeable(first: fx.Node, second: fx.Node) -> bool:
    """Whether both hold a tensor of the same shape, strides and dtype: whatever reads one could read the other."""
    one, other = tensor(first), tensor(second)
    return one is not None and other is not None and _form(one) == _form(other)


def _form(value: torch.Tensor) -> tuple[object, ...]:
    return tuple(value.shape), value.stride(), value.dtype, value.device


def dtype_of_cast(node: fx.Node) -> torch.dtype | None:
    """What ``node`` casts to; None if it does not cast a tensor to another dtype."""
    value = tensor(node)
    if operator_name(node) not in CASTS or value is None:
        return None
    source = tensor(node.all_input_nodes[0])
    return value.dtype if source is not None and source.dtype != value.dtype else None


def expressions(graph: fx.Graph) -> dict[fx.Node, int]:
    """A number for the value of each node: nodes with one number hold equal values, so that trading them changes nothing."""
    # Value numbering: a call has the number of an earlier one of the same operator on equally numbered inputs. Collectives, and
    # operators that write, draw or act, are never equal to another node. A write between two calls that read the same is not
    # seen, so such a pair counts as equal and is not traded.
    numbers: dict[Hashable, int] = {}
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        key: Hashable = node
        if operator_name(node) in _SAME_VALUE:
            found[node] = found[node.all_input_nodes[0]]
            continue
        if node.op == "call_function" and not communicates(node) and not effects_of(node).acts:
            key = repr((node.target, map_arg((node.args, node.kwargs), lambda source: f"%{found[source]}")))
        found[node] = numbers.setdefault(key, len(numbers))
    return found


def next_alike(seen: SeenGraph, nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each of ``nodes`` with the next one that could stand in its place and holds something else."""
    number = expressions(seen.graph)
    rest = list(dict.fromkeys(nodes))
    for at, node in enumerate(rest):
        # Only the next one: all pairs would grow as the square of the nodes.
        other = next((one for one in rest[at + 1 :] if interchangeable(node, one) and number[node] != number[one]), None)
        if other is not None:
            yield node, other


def renewed(seen: SeenGraph, *roles: Role) -> Iterator[tuple[Result, fx.Node]]:
    """Each output in one of ``roles`` that is another one than came in under its name, with what came."""
    came = inputs(seen, *roles)
    for result in results(seen, *roles):
        old = came.get(result.value.fqn)
        if old is not None and old is not result.node:
            yield result, old


def stale(seen: SeenGraph, *roles: Role) -> Iterator[Site]:
    """Sites that return what came in place of what is :func:`renewed`."""
    for (place, node, value), old in renewed(seen, *roles):
        yield Site(node.name, f"is not returned: {value.fqn} stays as it was", partial(give, {place: old.name}))


def returned_for_each_other(seen: SeenGraph, *roles: Role) -> Iterator[Site]:
    """Sites that swap two alike outputs in ``roles``."""
    place = {one.node: one.place for one in results(seen, *roles)}
    for first, second in next_alike(seen, place):
        by = {place[first]: second.name, place[second]: first.name}
        yield Site(first.name, f"and {second.name} are returned for each other", partial(give, by))


def swapped(seen: SeenGraph, role: Role) -> Iterator[Site]:
    """Sites that swap two alike values in ``role``: two outputs returned for each other, two inputs read for each other."""
    yield from returned_for_each_other(seen, role)
    for first, second in next_alike(seen, inputs(seen, role).values()):
        readers = tuple(dict.fromkeys(user.name for node in (first, second) for user in node.users))
        if readers:
            how = f"and {second.name} are read for each other"
            yield Site(first.name, how, partial(trade, first.name, second.name, readers))


def writes(seen: SeenGraph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(writer, written tensor) of each operator that writes one tensor and whose result is that tensor or is not read."""
    for node in seen.graph.nodes:
        if overload(node) is None or communicates(node):
            continue
        targets = written_arguments(node)
        if len(targets) == 1 and tensor(targets[0]) is not None and (returns_written(node) or not node.users):
            yield node, targets[0]


# Changes. All take names of nodes, or places of outputs, and the graph last.


def give(by: Mapping[int, str], broken: BrokenGraph) -> None:
    """Return the nodes ``by`` in their places."""
    give_nodes({place: broken[name] for place, name in by.items()}, broken)


def give_nodes(by: Mapping[int, fx.Node], broken: BrokenGraph) -> None:
    """As :func:`give`, of nodes that may be new."""
    output = broken.graph.output_node()
    values = returned(output)
    for place, node in by.items():
        values[place] = node
    output.args = (values if isinstance(output.args[0], (list, tuple)) else values[0],)


def trade(first: str, second: str, readers: Iterable[str], broken: BrokenGraph) -> None:
    """Let ``readers`` read ``first`` where they read ``second``, and the other way round."""
    pair = {broken[first]: broken[second], broken[second]: broken[first]}
    for name in readers:
        exchange(broken[name], lambda node: pair.get(node, node))


def exchange(reader: fx.Node, other: Callable[[fx.Node], Any]) -> None:
    """Let ``reader`` read ``other(node)`` for each node that it reads."""
    reader.args, reader.kwargs = map_arg(reader.args, other), map_arg(reader.kwargs, other)


def leave_out(name: str, broken: BrokenGraph) -> None:
    """Let readers of ``name`` read its first input instead."""
    broken.bypass(broken[name], broken[name].all_input_nodes[0])


def read_instead(name: str, by: str, broken: BrokenGraph) -> None:
    """Let readers of ``name`` read ``by`` instead."""
    broken.bypass(broken[name], broken[by])


def scale(name: str, factor: float, broken: BrokenGraph) -> None:
    """Let readers of ``name`` read ``factor`` times what it gives."""
    put_behind(broken[name], broken.behind(broken[name], torch.ops.aten.mul.Tensor, broken[name], factor))


def put_behind(node: fx.Node, by: fx.Node) -> None:
    """Let all readers of ``node`` read ``by`` instead, but for ``by`` itself, which is made of ``node``."""
    node.replace_all_uses_with(by, delete_user_cb=lambda user: user is not by)
