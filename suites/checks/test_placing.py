"""Graphs that were traced on the CPU, placed on another device; ``meta`` stands for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_fxbucket.checks.devices import cannot_run_on, place
from pytest_fxbucket.step.portable import decode, digest, encode_module


def constants(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(3, device="cpu") + torch.arange(3, device="cpu")
    return x * mask + torch.tensor([1.0, 2.0, 3.0]) + x.to(device=torch.device("cpu"), dtype=torch.float64)


def traced(function: Any, *inputs: torch.Tensor) -> fx.GraphModule:
    """As a rank has it."""
    return decode(encode_module(make_fx(function)(*inputs)))


def devices(graph: fx.GraphModule) -> set[str]:
    named = [str(value) for node in graph.graph.nodes for value in node.kwargs.values() if isinstance(value, torch.device)]
    return {*named, *(str(tensor.device) for name, tensor in vars(graph).items() if isinstance(tensor, torch.Tensor))}


class TestPlace:
    def test_device_arguments_and_constants_follow(self) -> None:
        graph = traced(constants, torch.ones(3))
        assert devices(graph) == {"cpu"}
        place(graph, "meta")
        assert devices(graph) == {"meta"}
        result = graph(torch.ones(3, device="meta"))
        assert (result.device.type, result.dtype) == ("meta", torch.float64)

    def test_on_the_cpu_nothing_changes(self) -> None:
        graph = traced(constants, torch.ones(3))
        before = digest(encode_module(graph))
        place(graph, "cpu")
        assert digest(encode_module(graph)) == before
        assert torch.equal(graph(torch.ones(3)), constants(torch.ones(3)))

    def test_other_devices_stay(self) -> None:
        graph = traced(lambda x: x + torch.zeros(3, device="meta").numel(), torch.ones(3))
        graph.graph.create_node("call_function", torch.ops.aten.zeros.default, ([2],), {"device": torch.device("meta")})
        place(graph, "cuda:0")
        assert devices(graph) == {"meta"}

    def test_nested_arguments_and_graphs_follow(self) -> None:
        inner = traced(constants, torch.ones(3))
        outer = fx.Graph()
        x = outer.placeholder("x")
        outer.output(outer.call_function(apply, (outer.get_attr("inner"), [x, (torch.device("cpu"),)])))
        graph = fx.GraphModule(torch.nn.ModuleDict({"inner": inner}), outer)
        place(graph, "meta")
        assert devices(graph.get_submodule("inner")) == {"meta"}
        assert graph(torch.ones(3, device="meta")).device.type == "meta"


def apply(inner: fx.GraphModule, given: Any) -> Any:
    assert given[1] == (torch.device("meta"),)
    return inner(given[0])


def attention(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]


class TestCannotRun:
    def test_an_operator_that_only_the_cpu_has_is_named_with_its_node(self) -> None:
        graph = traced(attention, torch.ones(1, 2, 4, 8))
        assert cannot_run_on("cuda", graph) == (
            "the graph, which is traced on the CPU, calls aten._scaled_dot_product_flash_attention_for_cpu.default "
            "(_scaled_dot_product_flash_attention_for_cpu), which cuda does not have"
        )
        assert cannot_run_on("cpu", graph) == ""

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
