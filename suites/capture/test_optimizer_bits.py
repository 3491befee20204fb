"""An update's graph changes parameters and state as the optimizer itself does, bit for bit, over steps with changing rates."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pytest_fxbucket.graph.effects import written
from suites.capture.functional_graphs import bytes_of, same
from suites.capture.optimizer_steps import beginning, eager, gradients, graph, shards, step, trace_update, values

LRS = [1.0, 0.5, 0.25, 2.0]
WAYS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def differing(one, other):
    assert set(one) == set(other)
    return [fqn for fqn in one if not same([one[fqn]], [other[fqn]])]


def compare(build, parameters=None, max_norm=0.0, without=()):
    parameters = parameters or shards()
    grads = [gradients({f: p for f, p in parameters.items() if f not in without}, number) for number in range(len(LRS))]
    run = [way(build, parameters, grads, LRS, max_norm) for way in (eager, graph)]
    assert differing(*run) == []
    changed = [fqn for fqn in parameters if bytes_of(run[0][fqn]) != bytes_of(parameters[fqn])]
    assert changed == [fqn for fqn in parameters if fqn not in without]


def one(kind, **args):
    return lambda parameters: [kind(list(parameters.values()), **args)]


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
KINDS = {
    "sgd": (SGD, {"lr": 0.1}),
    "sgd-nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "sgd-maximize": (SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True, "weight_decay": 0.01}),
    "adam-amsgrad-decay": (ADAM, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "adamw-amsgrad-maximize": (ADAMW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_gives_eagers_bits(kind, way):
    factory, args = KINDS[kind]
    compare(one(factory, **args, **WAYS[way]))


@pytest.mark.parametrize("way", WAYS)
def test_parameters_of_two_dtypes_in_one_optimizer(way):
    compare(one(ADAMW, lr=0.01, **WAYS[way]), shards([torch.float32, torch.bfloat16]))


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_without_gradient_has_no_state_and_is_no_input(way):
    build = one(ADAM, lr=0.01, **WAYS[way])
    compare(build, without=("scale",))
    update = trace_update(build, values(shards()), [fqn for fqn in shards() if fqn != "scale"])
    assert not [value for value in (*update.inputs, *update.outputs) if value.fqn.startswith("scale")]


@pytest.mark.parametrize("way", WAYS)
def test_dampening_gives_eagers_bits_from_the_second_step_on(way):
    """Before the first step eager has no momentum, which no tensor can say; a captured step may begin behind that one."""
    build = one(SGD, lr=0.1, momentum=0.9, dampening=0.5, **WAYS[way])
    parameters = shards()
    grads = [gradients(parameters, number) for number in range(4)]
    begun = eager(build, parameters, grads[:1], LRS[:1])
    update = trace_update(build, values(parameters), list(parameters))
    now, first = beginning(build, parameters, list(parameters))
    now.update(begun)
    for grad, lr in zip(grads[1:], LRS[1:], strict=True):
        step(update, now, grad, {name: rate * lr for name, rate in first.items()})
    assert differing(eager(build, parameters, grads, LRS), now) == []


OTHERS = ["Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "Rprop"]


@pytest.mark.parametrize("way", ["plain", "foreach"])
@pytest.mark.parametrize("kind", OTHERS)
def test_other_optimizers_give_eagers_bits(kind, way):
    compare(one(getattr(torch.optim, kind), **WAYS[way]))


def test_fused_adagrad_gives_eagers_bits():
    compare(one(torch.optim.Adagrad, fused=True))


def test_muon_gives_eagers_bits_for_matrices():
    compare(one(torch.optim.Muon), {fqn: tensor for fqn, tensor in shards().items() if tensor.dim() == 2})


def groups_and_optimizers(parameters, way):
    fqns = list(parameters)
    decayed = [parameters[fqn] for fqn in fqns[:2]]
    return [
        ADAMW([{"params": decayed, "lr": 0.02}, {"params": [parameters[fqns[2]]], "weight_decay": 0.0}], lr=0.01, **WAYS[way]),
        SGD([parameters[fqn] for fqn in fqns[3:]], lr=0.1, momentum=0.9, **WAYS[way]),
    ]


@pytest.mark.parametrize("way", WAYS)
def test_several_groups_and_optimizers_keep_their_own_rates(way):
    build = partial(groups_and_optimizers, way=way)
    compare(build)
    update = trace_update(build, values(shards()), list(shards()))
    rates = [value.fqn for value in update.inputs if value.role == "hyper"]
    assert rates == ["optimizers.0.groups.0.lr", "optimizers.0.groups.1.lr", "optimizers.1.groups.0.lr"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_by_the_global_norm_gives_eagers_bits(way, max_norm):
    compare(one(ADAMW, lr=0.01, **WAYS[way]), shards([torch.float32, torch.bfloat16]), max_norm=max_norm)


@pytest.mark.parametrize("way", WAYS)
def test_the_graph_writes_nothing_and_knows_no_profiler(way):
    update = trace_update(one(ADAMW, lr=0.01, **WAYS[way]), values(shards()), list(shards()))
    nodes = list(update.graph_module.graph.nodes)
    assert not [node for node in nodes if written(node) or "profiler" in str(node.target) or node.op == "get_attr"]
    update.graph_module.graph.lint()


@pytest.mark.parametrize("way", WAYS)
def test_every_new_parameter_is_made_of_its_own_gradient(way):
    update = trace_update(one(ADAMW, lr=0.01, **WAYS[way]), values(shards()), list(shards()))
    graph = update.graph_module.graph
    inputs = {(v.role, v.fqn): n for v, n in zip(update.inputs, graph.find_nodes(op="placeholder"), strict=True)}
    for value, node in zip(update.outputs, graph.output_node().args[0], strict=True):
        assert node.op != "placeholder"
        if value.role == "param":
            assert inputs["grad", value.fqn] in sources(node)


def sources(node):
    found = {node}
    queue = [node]
    for one_of in queue:
        fresh = [arg for arg in one_of.all_input_nodes if arg not in found]
        found.update(fresh)
        queue.extend(fresh)
    return found
