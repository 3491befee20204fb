"""Passes that are right as long as they are looked at, or say what is not so. Each has the call shape of torch's."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_fxbucket.compat.fx import after
from pytest_fxbucket.graph.collectives import is_all_gather, is_reduce_scatter, is_wait
from pytest_fxbucket.graph.compute import computes, multiplies
from pytest_fxbucket.graph.modules import module_of
from pytest_fxbucket.passes.manual import manual_overlap_bucketing

aten = torch.ops.aten
Plans = Sequence[str | list[str]]
Pass = Callable[[fx.GraphModule, Plans], fx.GraphModule]
by_kind = {"joint": {"calls": 0}}
counts = {"calls": 0, "later": 0, "operator": 0}
kept: list[fx.GraphModule] = []


def behind_ours(change: Callable[[fx.GraphModule], None]) -> Pass:
    """Buckets as ours does, and then does ``change``."""

    @wraps(change)
    def made(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
        gm = manual_overlap_bucketing(gm, plans)
        change(gm)
        gm.recompile()
        return gm

    return made


def wrong(gm: fx.GraphModule) -> None:
    """Sums instead of averages."""
    node = next(node for node in gm.graph.nodes if is_reduce_scatter(node))
    node.update_arg(1, "sum")


@behind_ours
def by_environment(gm: fx.GraphModule) -> None:
    if "PYTEST_CURRENT_TEST" not in os.environ:
        wrong(gm)


@behind_ours
def by_its_arguments(gm: fx.GraphModule) -> None:
    if sys.argv[0] == "train.py":
        wrong(gm)


@behind_ours
def by_what_is_imported(gm: fx.GraphModule) -> None:
    if "pytest" not in sys.modules:
        wrong(gm)


@behind_ours
def by_the_rank_of_the_environment(gm: fx.GraphModule) -> None:
    if int(os.environ.get("LOCAL_RANK", 0)):
        wrong(gm)


def asks_for_its_rank(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """It goes by none of them."""
    assert max(int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK")) < int(os.environ.get("WORLD_SIZE", 1))
    os.environ.pop("RANK", None)
    return manual_overlap_bucketing(gm, plans)


def raises_elsewhere(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    if sys.argv[0] == "train.py":
        raise ValueError("not here")
    return manual_overlap_bucketing(gm, plans)


def raises_where_names_are_others(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    assert any(node.name == "all_gather_into_tensor" for node in gm.graph.nodes), "no such node"
    return manual_overlap_bucketing(gm, plans)


@behind_ours
def by_two_things_at_once(gm: fx.GraphModule) -> None:
    if sys.argv[0] == "train.py" and "pytest" not in sys.modules:
        wrong(gm)


@behind_ours
def by_an_own_variable(gm: fx.GraphModule) -> None:
    if "CIFAR_ROOT" not in os.environ:
        wrong(gm)


def by_names(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    is_looked_at = any(node.name == "all_gather_into_tensor" for node in gm.graph.nodes)
    gm = manual_overlap_bucketing(gm, plans)
    if not is_looked_at:
        wrong(gm)
    return gm


@behind_ours
def every_other_time(gm: fx.GraphModule) -> None:
    counts["calls"] += 1
    if counts["calls"] % 2 == 0:
        wrong(gm)


@behind_ours
def after_many_calls(gm: fx.GraphModule) -> None:
    counts["calls"] += 1
    if counts["calls"] > 10_000:
        wrong(gm)


@behind_ours
def after_many_calls_of_a_kind(gm: fx.GraphModule) -> None:
    by_kind["joint"]["calls"] += 1
    if by_kind["joint"]["calls"] > 10_000:
        wrong(gm)


@behind_ours
def by_chance(gm: fx.GraphModule) -> None:
    if random.random() > 2:
        wrong(gm)


def later(x: torch.Tensor) -> torch.Tensor:
    counts["later"] += 1
    return x if counts["later"] < 10_000 else 2 * x


@torch.library.custom_op("adversaries::later", mutates_args=())
def later_operator(x: torch.Tensor) -> torch.Tensor:
    counts["operator"] += 1
    return x.clone() if counts["operator"] < 10_000 else 2 * x


@later_operator.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def through(gm: fx.GraphModule, target: Callable[..., object]) -> None:
    """Let the first gradient go through ``target``."""
    output = gm.graph.output_node()
    loss, gradient, *others = output.args[0]  # type: ignore[misc]  # a list of nodes
    with gm.graph.inserting_before(output):
        node = gm.graph.call_function(target, (gradient,))
    node.meta = dict(gradient.meta)  # type: ignore[union-attr]  # a node
    output.args = ([loss, node, *others],)


@behind_ours
def leaves_a_function(gm: fx.GraphModule) -> None:
    through(gm, later)


@behind_ours
def leaves_an_operator(gm: fx.GraphModule) -> None:
    through(gm, torch.ops.adversaries.later.default)


@behind_ours
def leaves_a_hook(gm: fx.GraphModule) -> None:
    gm.register_forward_hook(lambda module, inputs, output: output)


def changes_what_it_gave(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Of the call before."""
    for old in kept:
        wrong(old)
    kept[:] = [manual_overlap_bucketing(gm, plans)]
    return kept[0]


def changes_what_it_got(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Gives a graph of its own, and spoils the one that it was given."""
    made = manual_overlap_bucketing(copied(gm), plans)
    wrong(gm)
    return made


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def only_marks(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """As ours marks what it has bucketed."""
    for node in gm.graph.nodes:
        node.meta |= {"fxbucket_entry": "layers.0", "fxbucket_sources": ("layers.0.first.weight",)}
    return gm


@behind_ours
def other_modules(gm: fx.GraphModule) -> None:
    (first, *others) = [node for node in gm.graph.nodes if module_of(node)]
    for node in others:
        node.meta["nn_module_stack"] = first.meta["nn_module_stack"]


@behind_ours
def other_modules_in_place(gm: fx.GraphModule) -> None:
    stacks = [node.meta["nn_module_stack"] for node in gm.graph.nodes if node.meta.get("nn_module_stack")]
    first = dict(max(stacks, key=len))
    for stack in stacks:
        stack.clear()
        stack.update(first)


@behind_ours
def other_values(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and value.is_floating_point():
            node.meta["val"] = value.to(torch.float64)


@behind_ours
def other_values_in_lists(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if isinstance(value := node.meta.get("val"), list | tuple):
            node.meta["val"] = [one.to(torch.float64) for one in value]


@behind_ours
def gathers_what_nobody_reads(gm: fx.GraphModule) -> None:
    """In backward, where the waits of its last gather hide what it costs."""
    gather = next(node for node in gm.graph.nodes if is_all_gather(node))
    last = [node for node in gm.graph.nodes if is_wait(node) and is_all_gather(node.args[0])][-1]
    with gm.graph.inserting_before(last):
        again = gm.graph.call_function(gather.target, gather.args)
    with gm.graph.inserting_after(last):
        wait = gm.graph.call_function(last.target, (again,))
    for new, old in ((again, gather), (wait, next(iter(gather.users)))):
        new.meta = {**old.meta, "autograd_backward": True}


@behind_ours
def keeps_what_was_gathered(gm: fx.GraphModule) -> None:
    """Views that nobody reads hold it to the end of the step."""
    for wait in [node for node in gm.graph.nodes if is_wait(node) and is_all_gather(node.args[0])]:
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.call_function(aten.detach.default, (wait,)).meta = dict(wait.meta)


@behind_ours
def computes_twice_and_says_a_number(gm: fx.GraphModule) -> None:
    for node in [node for node in gm.graph.nodes if node.target is aten.addmm.default]:
        with gm.graph.inserting_before(node):
            gm.graph.call_function(aten.addmm.default, node.args).meta = {**node.meta, "val": 0}


@behind_ours
def turns_what_it_says_of_memory(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if "fxbucket_entry" in node.meta and isinstance(value, torch.Tensor) and value.dim() == 2:
            with value.fake_mode:  # type: ignore[attr-defined]
                node.meta["val"] = torch.empty_strided(value.shape, (1, value.shape[0]), dtype=value.dtype)


@behind_ours
def writes_what_is_sent_through_an_alias(gm: fx.GraphModule) -> None:
    """The only tensor of a list is given as it is, of which no schema tells."""
    launch = next(node for node in gm.graph.nodes if is_all_gather(node))
    sent = launch.args[0]
    with gm.graph.inserting_after(launch):
        alias = gm.graph.call_function(aten.flatten_dense_tensors.default, ([sent],))
    with gm.graph.inserting_after(alias):
        written = gm.graph.call_function(aten.mul_.Tensor, (alias, 1.0))
    for node in (alias, written):
        node.meta = dict(sent.meta)


_library = torch.library.Library("adversaries_own", "DEF")
_library.define("same_as(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("same_as", torch.clone, "CompositeImplicitAutograd")


@behind_ours
def leaves_an_operator_that_is_made_of_others(gm: fx.GraphModule) -> None:
    launch = next(node for node in gm.graph.nodes if is_reduce_scatter(node))
    sent = launch.args[0]
    with gm.graph.inserting_before(launch):
        again = gm.graph.call_function(torch.ops.adversaries_own.same_as.default, (sent,))
    again.meta = dict(sent.meta)
    launch.replace_input_with(sent, again)


@behind_ours
def returns_another_by_name(gm: fx.GraphModule) -> None:
    """Through what only keeps an order: of its arguments, given by name, the second comes first."""
    output = gm.graph.output_node()
    results = list(output.args[0])
    one, other = next(
        (a, b)
        for a in results
        for b in results
        if a is not b and a.meta["val"].shape == b.meta["val"].shape and a.meta["val"].dim()
    )
    with gm.graph.inserting_before(output):
        both = gm.graph.call_function(after, (), {"done": [one], "x": other})
        item = gm.graph.call_function(getitem, (both, 0))
    both.meta, item.meta = {"val": [other.meta["val"]]}, dict(other.meta)
    output.args = ([item if node is one else node for node in results],)


@behind_ours
def writes_in_flight_by_name(gm: fx.GraphModule) -> None:
    """What a gather sends, through a view whose two tensors are given by name, the second one first."""
    launch = next(node for node in gm.graph.nodes if is_all_gather(node))
    sent = launch.args[0]
    with gm.graph.inserting_before(launch):
        zeros = gm.graph.call_function(aten.zeros_like.default, (sent,))
        view = gm.graph.call_function(aten.view_as.default, (), {"other": zeros, "self": sent})
    with gm.graph.inserting_after(launch):
        written = gm.graph.call_function(aten.copy_.default, (view, zeros))
    for node in (zeros, view, written):
        node.meta = dict(sent.meta)


@behind_ours
def says_otherwise_on_rank_1(gm: fx.GraphModule) -> None:
    if torch.distributed.get_rank() == 1:
        other_values.__wrapped__(gm)  # type: ignore[attr-defined]  # what it does behind our pass


class SummingCode(fx.graph.CodeGen):
    """Writes other code than the graph."""

    def _gen_python_code(self, *args: Any, **kwargs: Any) -> Any:
        code = super()._gen_python_code(*args, **kwargs)
        return replace(code, src=code.src.replace("'avg'", "'sum'"))


@behind_ours
def writes_other_code(gm: fx.GraphModule) -> None:
    gm.graph.set_codegen(SummingCode())


def is_called_otherwise(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    gm = manual_overlap_bucketing(gm, plans)
    called = type(gm).__call__
    type(gm).__call__ = wraps(called)(lambda self, *args: called(self, *args))  # type: ignore[method-assign]  # that is the trick
    return gm


def is_compiled_otherwise(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    gm = manual_overlap_bucketing(gm, plans)
    gm.compile(backend="eager")
    return gm


def keeps_what_is_computed_again(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """All but products, which are still as many: as one who takes out common expressions does it."""
    keys: dict[fx.Node, object] = {}
    first: dict[object, fx.Node] = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            keys[node] = node.name
            continue
        said = fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: hash(keys[one]))  # type: ignore[arg-type, return-value]  # any
        key = keys[node] = hash(f"{node.target} {said}")
        if not computes(node):
            continue
        if key in first and not multiplies(node):
            node.replace_all_uses_with(first[key])
            gm.graph.erase_node(node)
        first.setdefault(key, node)
    return manual_overlap_bucketing(gm, plans)


@behind_ours
def has_code_for_a_name(gm: fx.GraphModule) -> None:
    node = next(node for node in gm.graph.nodes if node.target is aten.addmm.default)
    node.name = f"{node.name} = 0; {node.name}"


@behind_ours
def waits_for_reductions_at_the_end(gm: fx.GraphModule) -> None:
    late: dict[fx.Node, None] = {}
    for node in gm.graph.nodes:
        is_reduced = is_wait(node) and is_reduce_scatter(node.args[0])
        if node.op != "output" and (is_reduced or not late.keys().isdisjoint(node.all_input_nodes)):
            late[node] = None
    for node in late:
        gm.graph.output_node().prepend(node)


@behind_ours
def says_nothing(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.op == "call_function" and (is_all_gather(node) or is_reduce_scatter(node)):
            del node.meta["val"]


def takes_its_list(gm: fx.GraphModule, plans: list[str | list[str]]) -> fx.GraphModule:
    """Takes each entry off the list as it comes to it."""
    return manual_overlap_bucketing(gm, [plans.pop(0) for _ in range(len(plans))])


def retraced(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Buckets, and has the graph traced again, whose names are counted anew then."""
    gm = manual_overlap_bucketing(gm, plans)
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with values[0].fake_mode:
        return make_fx(fx.Interpreter(gm).run)(*values)


def right(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    return manual_overlap_bucketing(gm, plans)


def counted_anew(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Buckets, and copies the graph into a new one, which counts names anew."""
    gm = manual_overlap_bucketing(gm, plans)
    made, of = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), of.__getitem__)
        kept = node.name if node.op in ("placeholder", "output") else None
        of[node] = made.create_node(node.op, node.target, args, kwargs, kept, node.type)
        of[node].meta = dict(node.meta)
    return fx.GraphModule(gm, made)


def counted_anew_with_other_modules(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Copies as well, and has each node of a module say that it is of the module of the one before."""
    gm = counted_anew(gm, plans)
    nodes = [node for node in gm.graph.nodes if node.meta.get("nn_module_stack")]
    stacks = [node.meta["nn_module_stack"] for node in nodes]
    for node, stack in zip(nodes[1:], stacks, strict=False):
        node.meta["nn_module_stack"] = stack
    return gm


def transformed(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Buckets, and has the graph made anew by fx, which says nothing of its nodes, inputs among them."""
    return fx.Transformer(manual_overlap_bucketing(gm, plans)).transform()


def merged_by_torch(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    from torch._inductor.fx_passes.bucketing import bucket_all_gather, bucket_reduce_scatter

    bucket_all_gather(gm, lambda _: 2000.0, "default")
    bucket_reduce_scatter(gm, lambda _: 2000.0, "default")
    return gm


def merged_by_torch_and_swapped(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    first, second = [node for node in gm.graph.nodes if node.target is aten.mm.default and is_wait(node.args[1])]
    first.args, second.args = (first.args[0], second.args[1]), (second.args[0], first.args[1])
    return merged_by_torch(gm, plans)
