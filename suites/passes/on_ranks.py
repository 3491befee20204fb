"""A graph before and after a pass on real ranks: are all outputs, and all inputs as it leaves them, the same bit for bit?"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import fx

from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.step.portable import encode_module
from suites.passes.rank_jobs_of_passes import Case, Given, Groups

JOB = "suites.passes.rank_jobs_of_passes:compare"
LIMIT_S = 60.0
HALVES: dict[int, Groups] = {
    2: {"halves": [[0], [1]], "strided": [[0], [1]]},
    4: {"halves": [[0, 1], [2, 3]], "strided": [[0, 2], [1, 3]]},
}
"""Groups of half the ranks: neighbours, and every other one, so that a rank's index in its group is not its number."""


def compare(
    pools: Pools,
    before: fx.GraphModule,
    after: fx.GraphModule,
    world: int,
    seed: int = 0,
    groups: Groups | None = None,
) -> list[str]:
    """What differs between ``before`` and ``after`` on any of ``world`` gloo ranks, a sentence each; none if they are equal.

    Each rank makes inputs of its own from the placeholders' fake values: small integers, held in the placeholder's dtype, so
    that sums are exact. Reductions add in rank order. ``groups`` are those that the graphs name besides ``"0"``, the world.
    """
    return compare_all(pools, before, [after], world, seed, groups)[0]


def compare_all(
    pools: Pools,
    before: fx.GraphModule,
    after: Sequence[fx.GraphModule],
    world: int,
    seed: int = 0,
    groups: Groups | None = None,
) -> list[list[str]]:
    """As :func:`compare`, for several graphs that passes made of one."""
    portable = tuple(encode_module(one) for one in after)
    named = {name: lists for name, lists in (groups or {}).items() if name in _names(before, *after)}
    case = Case(encode_module(before), portable, tuple(given(before)), seed, named)
    results = pools.get(world).run(JOB, [case] * world, timeout_s=LIMIT_S, what="graphs before and after a pass")
    return [[text for result in results for text in result[number]] for number in range(len(after))]


def _names(*graph_modules: fx.GraphModule) -> set[str]:
    launches = [collectives.read_launch(node) for one in graph_modules for node in one.graph.nodes]
    return {launch.group for launch in launches if launch is not None}


def given(graph_module: fx.GraphModule) -> Iterator[Given]:
    """What inputs to make for ``graph_module``."""
    storages: dict[object, int] = {}
    for node in graph_module.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        storage = storages.setdefault(value.untyped_storage()._cdata, len(storages))
        yield Given(tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, storage)


def copied(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The same graph again, with the same fake values: for a pass to change."""
    return fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))


@contextmanager
def fake_groups(world: int, groups: Groups | None = None, rank: int = 0) -> Iterator[None]:
    """This process as ``rank`` of fake ranks whose process groups have the names that graphs use, as a pass finds them."""
    from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

    names: list[str] = []
    with fake_world(rank, world):
        for name, lists in sorted((groups or {}).items()):
            for ranks in lists:
                group = dist.new_group(list(ranks))
                if rank in ranks:
                    _register_process_group(name, group)
                    names.append(name)
        try:
            yield
        finally:
            for name in names:
                _unregister_process_group(name)
