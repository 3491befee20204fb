"""Small graphs of local tensors, with what is known of their placements; and passes that spoil graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_fxbucket.capture import TracedStep, placed_step
from pytest_fxbucket.compat.c10d import c10d_functional

WEIGHT = torch.arange(32.0).reshape(8, 4)


def traced(function: Callable[..., Any], *shapes: tuple[int, ...]) -> fx.GraphModule:
    """A graph of tensors of these shapes."""
    return make_fx(function, tracing_mode="fake")(*(torch.empty(shape) for shape in shapes))


def two_by_two() -> DeviceMesh:
    """A mesh of four ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def joint() -> fx.GraphModule:
    """Loss and gradient of a weight of which a rank has 4 x 2, and x."""
    return traced(lambda weight, x: [(weight * x).sum(), x * 2], (4, 2), (4, 2))


def ids() -> fx.GraphModule:
    """The same, of an x of whole numbers."""
    return make_fx(lambda weight, x: [(weight * x).sum(), weight * 2], tracing_mode="fake")(
        torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int64)
    )


def step_of(mesh: DeviceMesh, **changed: Any) -> TracedStep:
    """The step of :func:`joint`; the weight is parted over dp by columns and over tp by rows."""
    given: dict[str, Any] = {
        "graphs": joint(),
        "parameters": {"weight": (WEIGHT, (Shard(1), Shard(0)))},
        "batch": {"x": (torch.ones(8, 2), (Shard(0), Replicate()))},
        "loss": (Replicate(), Replicate()),
        **changed,
    }
    return placed_step(given.pop("graphs"), mesh, **given)


def unreduced() -> TracedStep:
    """A step on two ranks that have copies of the weight, whose gradient nothing reduces, though it is placed as a copy.

    It calls an operator that only inductor registers, as graphs do that went through its decompositions.
    """
    import torch._inductor.inductor_prims

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return placed_step(
        traced(lambda weight, x: [torch.ops.prims.fma(weight, x, x).sum(), x * 2], (4, 2), (4, 2)),
        mesh,
        parameters={"weight": (torch.ones(4, 2), (Replicate(),))},
        batch={"x": (torch.rand(8, 2), (Shard(0),))},
        loss=(Replicate(),),
    )


def parted(**changed: fx.GraphModule) -> dict[str, fx.GraphModule]:
    """Graphs of a step of two parameters of 4 elements, on one rank; what they hand on has no names."""
    return {
        "unshard": traced(lambda a, b: [a * 2, b + 0.0], (4,), (4,)),
        "forward": traced(lambda a, b, x: [(a * b * x).sum(), b * x, a * x], (4,), (4,), (4,)),
        "backward": traced(lambda bx, ax: [bx + 1, ax + 2], (4,), (4,)),
        "reduce": traced(lambda a, b: [a * 2, b * 3], (4,), (4,)),
        **changed,
    }


def parted_step(mesh: DeviceMesh, graphs: dict[str, fx.GraphModule] | None = None, **given: Any) -> TracedStep:
    """Their step."""
    drawn = torch.empty(4, device="meta")
    parameters = {name: (drawn, (Replicate(),)) for name in ("a", "b")}
    batch = {"x": (torch.tensor([1.0, 2.0, 3.0, 4.0]), (Replicate(),))}
    return placed_step(graphs or parted(), mesh, parameters=parameters, batch=batch, **given)


def biases_swapped(module: fx.GraphModule, plans: Any) -> fx.GraphModule:
    """A pass that swaps two gathered biases of one size in the graph that unshards; others are left as they are."""
    output = module.graph.output_node()
    values: Any = list(output.args[0])  # type: ignore[arg-type]  # a list
    gathers = module.graph.find_nodes(op="call_function", target=c10d_functional().all_gather_into_tensor.default)
    if gathers and len(values) == 6:
        values[1], values[3] = values[3], values[1]
        output.args = (values,)
        module.recompile()
    return module


def other_ranks() -> TracedStep:
    """A graph that launches on ranks 1 and 2 of four."""
    group = dist.new_group([1, 2])
    name = str(group.group_name) if dist.get_rank() in (1, 2) else "0"

    def run(weight: Tensor, x: Tensor) -> list[Tensor]:
        summed = c10d_functional().wait_tensor(c10d_functional().all_reduce(x, "sum", name))
        return [(weight * x).sum(), summed]

    return step_of(two_by_two(), graphs=traced(run, (4, 2), (4, 2)))


def left_as_it_is(module: fx.GraphModule, plans: Any) -> fx.GraphModule:
    """A pass that does nothing."""
    return module
