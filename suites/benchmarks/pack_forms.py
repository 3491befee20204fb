"""Prints what the form of pack and unpack does to the time of a step: 4 ranks over gloo, each form beside the default.

A Llama of two layers, by size of its parameters; the same graph in each form, one step of each in turns, the slowest rank's
seconds. A ratio is the median over the turns, with the quartiles beside it. ``make bench``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from operator import getitem
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.checks.bitwise.check import task_of
from pytest_fxbucket.checks.bitwise.job import BitwiseTask
from pytest_fxbucket.passes.new_nodes import NodeMaker
from pytest_fxbucket.passes.packers import Packing, cut_views, pack
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan_on_mesh import PlanOnMesh
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.step.mesh import shard_mesh
from pytest_fxbucket.step.portable import decode
from pytest_fxbucket.step_runner import state_and_batches
from suites.plans.llama import llama

RANKS = 4
DIMS = {64: ("4,000", 40), 256: ("65,000", 20), 1024: ("1,000,000", 6)}
"""Width of the model: elements of most of its parameters, and turns."""
aten = torch.ops.aten
Packed = tuple[fx.Node, Callable[[fx.Node], Sequence[fx.Node]]]


def fused(make: NodeMaker, bucket: Packing) -> Packed:
    """Packs and unpacks by the operators that do a bucket at once, where the default has cat, and a clone for each member."""
    if bucket.kind == "reduce_scatter":
        packed, unpack = make(aten._chunk_cat.default, list(bucket.inputs), 0, bucket.ranks), cut_views
        return packed, lambda arrived: unpack(make, bucket, arrived)
    packed = make(aten.flatten_dense_tensors.default, list(bucket.inputs))

    def columns(arrived: fx.Node) -> list[fx.Node]:
        rows = make(aten.view.default, arrived, [bucket.ranks, -1])
        pieces = make(aten.split_with_sizes_copy.default, rows, list(bucket.numels), 1)
        parts = [make(getitem, pieces, i) for i in range(len(bucket.inputs))]
        return [make(aten.view.default, part, list(shape)) for part, shape in zip(parts, bucket.shapes, strict=True)]

    return packed, columns


def reshaped(make: NodeMaker, bucket: Packing) -> Packed:
    """Unpacks a gather by views of its columns, which reshape copies, where the default clones them."""
    packed, unpack = pack(make, bucket)

    def columns(arrived: fx.Node) -> list[fx.Node]:
        rows = make(aten.view.default, arrived, [bucket.ranks, -1])
        pieces = make(aten.split_with_sizes.default, rows, list(bucket.numels), 1)
        parts = [make(getitem, pieces, i) for i in range(len(bucket.inputs))]
        return [make(aten.reshape.default, part, list(shape)) for part, shape in zip(parts, bucket.shapes, strict=True)]

    return packed, columns if bucket.kind == "all_gather" else unpack


def owned(make: NodeMaker, bucket: Packing) -> Packed:
    """Gives each reduced gradient a storage of its own, where the default gives views of what arrived."""
    packed, unpack = pack(make, bucket)
    if bucket.kind == "all_gather":
        return packed, unpack
    return packed, lambda arrived: [make(aten.clone.default, result) for result in unpack(arrived)]


def sliced(make: NodeMaker, bucket: Packing) -> Packed:
    """Cuts what a reduction brings by a slice for each member, where the default splits."""
    packed, unpack = pack(make, bucket)

    def cut(arrived: fx.Node) -> list[fx.Node]:
        flat, begin, results = make(aten.view.default, arrived, [-1]), 0, []
        for numel, shape in zip(bucket.numels, bucket.shapes, strict=True):
            assert isinstance(numel, int)
            piece = make(aten.slice.Tensor, flat, 0, begin, begin + numel)
            results.append(make(aten.view.default, piece, list(shape)))
            begin += numel
        return results

    return packed, unpack if bucket.kind == "all_gather" else cut


FORMS = ("default", *(f"suites.benchmarks.pack_forms:{form.__name__}" for form in (fused, reshaped, owned, sliced)))


def main() -> None:
    """Print a row for each size."""
    names = [*(form.rpartition(":")[2] for form in FORMS[1:]), "unbucketed"]
    print(f"a step on {RANKS} ranks over gloo: seconds; each form beside the default pack, and no bucket at all")
    print(f"{'elements':>10} {'default':>9}" + "".join(f"{name:>18}" for name in names))
    pools = Pools()
    try:
        for dim, (elements, turns) in DIMS.items():
            default, *others = measure(pools, dim, turns)
            row = "".join(f"{beside(other, default):>18}" for other in others)
            print(f"{elements:>10} {statistics.median(default):8.3f}s{row}", flush=True)
    finally:
        pools.close()


def beside(form: Sequence[float], default: Sequence[float]) -> str:
    """Median of the turns' ratios, and the quartiles."""
    low, middle, high = statistics.quantiles((a / b for a, b in zip(form, default, strict=True)), n=4)
    return f"{middle:.2f} ({low:.2f} {high:.2f})"


def measure(pools: Pools, dim: int, turns: int) -> list[list[float]]:
    """Seconds of each turn in each form, and unbucketed."""
    text = llama(f"layers = 2, dim = {dim}", RANKS)
    plans = [parse_plans(f'{text}packer = "{form}"\n', Path("pack_forms.toml"))[0] for form in FORMS]
    worlds = [PlanOnMesh(CapturedPlan(plan, shard_mesh(RANKS)), "manual") for plan in plans]
    payloads = [(turns, [task_of(world, "joint", rank, "gloo") for world in worlds]) for rank in range(RANKS)]
    told = pools.get(RANKS, "gloo").run("suites.benchmarks.pack_forms:job", payloads, timeout_s=600)
    return [[max(times) for times in zip(*form, strict=True)] for form in zip(*told, strict=True)]


def job(rank: int, world: int, payload: tuple[int, Sequence[BitwiseTask]]) -> list[list[float]]:
    """Seconds of each turn of each form, and of the unbucketed graph, on this rank."""
    turns, tasks = payload
    graphs = [decode(one.bucketed) for one in tasks] + [decode(tasks[0].unbucketed)]
    state, batches = state_and_batches(rank, tasks[0])
    inputs = [*state, *batches(0)]
    found: list[list[float]] = [[] for _ in graphs]
    for turn in range(turns + 1):
        for place in range(len(graphs)):
            number = (place + turn) % len(graphs)  # none has always the same one before it
            seconds, graph = found[number], graphs[number]
            dist.barrier()
            begin = time.perf_counter()
            graph(*inputs)
            if turn:  # the first one warms up
                seconds.append(time.perf_counter() - begin)
    return found


if __name__ == "__main__":
    main()
