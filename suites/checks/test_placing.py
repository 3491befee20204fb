"""Graphs that were traced on the CPU, placed on another device; ``meta`` stands for a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_fxbucket.capture.optimizers.update import TracedUpdate, trace_update
from pytest_fxbucket.checks.devices import cannot_run_on, place
from pytest_fxbucket.step.portable import decode, digest, encode_module
from pytest_fxbucket.step.roles import Value


def constants(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(3, device="cpu") + torch.arange(3, device="cpu")
    return x * mask + torch.tensor([1.0, 2.0, 3.0]) + x.to(device=torch.device("cpu"), dtype=torch.float64)


def traced(function: Any, *inputs: torch.Tensor) -> fx.GraphModule:
    """As a rank has it."""
    return decode(encode_module(make_fx(function)(*inputs)))


def values_of(graph: fx.GraphModule) -> list[Value]:
    return [Value("batch", node.name, (3,), torch.float32) for node in graph.graph.find_nodes(op="placeholder")]


def devices(graph: fx.GraphModule) -> set[str]:
    named = [str(value) for node in graph.graph.nodes for value in node.kwargs.values() if isinstance(value, torch.device)]
    return {*named, *(str(tensor.device) for name, tensor in vars(graph).items() if isinstance(tensor, torch.Tensor))}


class TestPlace:
    def test_device_arguments_and_constants_follow(self) -> None:
        graph = traced(constants, torch.ones(3))
        assert devices(graph) == {"cpu"}
        place([(graph, values_of(graph))], "meta")
        assert devices(graph) == {"meta"}
        result = graph(torch.ones(3, device="meta"))
        assert (result.device.type, result.dtype) == ("meta", torch.float64)

    def test_on_the_cpu_nothing_changes(self) -> None:
        graph = traced(constants, torch.ones(3))
        before = digest(encode_module(graph))
        place([(graph, values_of(graph))], "cpu")
        assert digest(encode_module(graph)) == before
        assert torch.equal(graph(torch.ones(3)), constants(torch.ones(3)))

    def test_other_devices_stay(self) -> None:
        graph = traced(lambda x: x + torch.zeros(3, device="meta").numel(), torch.ones(3))
        graph.graph.create_node("call_function", torch.ops.aten.zeros.default, ([2],), {"device": torch.device("meta")})
        place([(graph, values_of(graph))], "cuda:0")
        assert devices(graph) == {"meta"}

    def test_nested_arguments_and_graphs_follow(self) -> None:
        inner = traced(constants, torch.ones(3))
        outer = fx.Graph()
        x = outer.placeholder("x")
        outer.output(outer.call_function(apply, (outer.get_attr("inner"), [x, (torch.device("cpu"),)])))
        graph = fx.GraphModule(torch.nn.ModuleDict({"inner": inner}), outer)
        place([(graph, values_of(graph))], "meta")
        assert devices(graph.get_submodule("inner")) == {"meta"}
        assert graph(torch.ones(3, device="meta")).device.type == "meta"


def update_of(build: Any) -> TracedUpdate:
    values = [Value("param", name, (4,), torch.float32) for name in ("a", "b")]
    return trace_update(lambda given: [build(list(given.values()))], values, {"a", "b"})


STEP = Value("state", "a.step", (), torch.float32)


def handed_on() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output((graph.placeholder("step"),))
    return fx.GraphModule(torch.nn.Module(), graph)


class OwnSteps(torch.optim.Optimizer):
    """Keeps a number with each parameter, and never asks for its value but as a tensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("taken", torch.zeros(()))
                state["taken"] += 1
                p.sub_(p.grad * state["taken"], alpha=group["lr"])


class TestNumbers:
    @pytest.mark.parametrize("foreach", [False, True])
    def test_counters_and_rates_that_become_python_numbers_stay_on_the_cpu(self, foreach: bool) -> None:
        update = update_of(partial(torch.optim.AdamW, foreach=foreach, amsgrad=True))
        kept = place([(update.graph_module, update.inputs)], "meta")
        assert kept == {("state", "a.step"), ("state", "b.step"), ("hyper", "optimizers.0.groups.0.lr")}

    @pytest.mark.parametrize("build", [partial(torch.optim.AdamW, fused=True), OwnSteps])
    def test_those_that_a_kernel_reads_do_not_but_for_the_rate(self, build: Any) -> None:
        update = update_of(build)
        assert place([(update.graph_module, update.inputs)], "meta") == {("hyper", "optimizers.0.groups.0.lr")}

    def test_so_the_update_runs_there(self) -> None:
        update = update_of(partial(torch.optim.AdamW, foreach=True))
        kept = place([(update.graph_module, update.inputs)], "meta")
        given = [torch.ones(v.shape, dtype=v.dtype, device="cpu" if v.key in kept else "meta") for v in update.inputs]
        made = dict(zip([value.key for value in update.outputs], update.graph_module(*given), strict=True))
        assert {key: str(tensor.device) for key, tensor in made.items()} == {
            key: "cpu" if key in kept else "meta" for key in made
        }
        assert made["state", "a.step"] == 2

    def test_a_number_that_is_made_for_them_stays_with_them(self) -> None:
        graph = fx.Graph()
        step = graph.placeholder("step")
        one = graph.call_function(torch.ops.aten.full.default, ([], 1.0), {"device": torch.device("cpu")})
        taken = graph.call_function(torch.ops.aten.add.Tensor, (step, one))
        graph.output((taken, graph.call_function(torch.ops.aten._local_scalar_dense.default, (taken,))))
        module = fx.GraphModule(torch.nn.Module(), graph)
        assert place([(module, [STEP])], "meta") == {("state", "a.step")}
        assert devices(module) == {"cpu"}

    def test_a_number_that_meets_a_constant_goes_where_constants_go(self) -> None:
        graph, root = fx.Graph(), torch.nn.Module()
        root.register_buffer("one", torch.tensor(1.0))
        taken = graph.call_function(torch.ops.aten.add.Tensor, (graph.placeholder("step"), graph.get_attr("one")))
        graph.output((taken,))
        module = fx.GraphModule(root, graph)
        assert place([(module, [STEP])], "meta") == set()
        assert module.one.device.type == "meta"

    def test_what_another_graph_of_the_step_computes_with_does_not_stay(self) -> None:
        update = update_of(partial(torch.optim.AdamW, fused=True))
        graphs = [(handed_on(), [STEP]), (update.graph_module, update.inputs)]
        assert place(graphs, "meta") == {("hyper", "optimizers.0.groups.0.lr")}
        assert place([(handed_on(), [STEP])], "meta") == {STEP.key}

    def test_on_the_cpu_there_is_nothing_to_keep(self) -> None:
        update = update_of(torch.optim.AdamW)
        assert place([(update.graph_module, update.inputs)], "cpu") == set()


def apply(inner: fx.GraphModule, given: Any) -> Any:
    assert given[1] == (torch.device("meta"),)
    return inner(given[0])


def attention(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]


class TestCannotRun:
    def test_an_operator_that_only_the_cpu_has_is_named_with_its_node(self) -> None:
        graph = traced(attention, torch.ones(1, 2, 4, 8))
        assert cannot_run_on("cuda", graph, with_ours=False) == (
            "the graph, which is traced on the CPU, calls aten._scaled_dot_product_flash_attention_for_cpu.default "
            "(_scaled_dot_product_flash_attention_for_cpu), which cuda does not have"
        )
        assert cannot_run_on("cpu", graph, with_ours=False) == ""

    def test_attention_has_a_kernel_of_ours_there(self) -> None:
        assert cannot_run_on("cuda", traced(attention, torch.ones(1, 2, 4, 8))) == ""

    @pytest.mark.parametrize("device_type", ["cpu", "meta"])  # a CPU build of torch does not have all kernels of CUDA
    def test_ordinary_operators_run_everywhere(self, device_type: str) -> None:
        def step(x: torch.Tensor) -> torch.Tensor:
            return (x @ x).relu().sum(0).reshape(2, -1).t()

        assert cannot_run_on(device_type, traced(step, torch.ones(4, 4))) == ""

    def test_collectives_run_on_gpus(self) -> None:
        graph, ops = fx.Graph(), torch.ops._c10d_functional
        for op in (ops.all_gather_into_tensor.default, ops.reduce_scatter_tensor.default, ops.wait_tensor.default):
            graph.call_function(op)
        assert cannot_run_on("cuda", fx.GraphModule(torch.nn.Module(), graph)) == ""
