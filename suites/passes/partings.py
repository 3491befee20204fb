"""Where our pass and torch's part: what torch's does (it raises, computes something else, does nothing), and what ours does.

torch's own differs from version to version: here are those of 2.13 and of the newest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pytest_fxbucket.fuzz.program import HALVES, Program
from suites.passes import torch_graphs as graphs

Torchs = Literal[
    "raises",
    "other values",
    "does nothing",
    "merges nothing",
    "one bucket for both directions",
    "takes it for the default",
    "right",
]
VERSIONS = ("2.13", "2.15")
"""The versions of torch that the table is of; those between do as one of them, or as neither."""


@dataclass(frozen=True)
class Parting:
    """A graph and a plan on which the two passes part."""

    name: str
    """What a person would call it, for the page."""
    torchs: Torchs
    """What torch's pass does in 2.13."""
    ours: str
    """What ours does and why that is right, for the page."""
    build: graphs.Build
    """What the graph returns."""
    launches: tuple[str, ...] = ()
    """Launches after our pass, in order; none if it raises."""
    plan: Any = ("a",)
    mode: str | None = None
    """``bucket_mode``."""
    newest: Torchs | None = None
    """What it does in 2.15; None: the same."""
    on_halves: bool = False
    """Runs on 4 ranks, with two groups of half of them each, across each other."""

    def of(self, torch: str) -> Torchs:
        """What torch's pass does in one of :data:`VERSIONS`."""
        return self.torchs if torch == VERSIONS[0] or self.newest is None else self.newest

    def program(self) -> Program:
        """Where :attr:`build` makes its nodes."""
        return Program(4, HALVES[4]) if self.on_halves else Program(2)


GATHER, INTO, SCATTER, REDUCE = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_out",
    "reduce_scatter_tensor",
    "all_reduce",
)

PARTINGS: tuple[Parting, ...] = (
    Parting(
        "an all-gather into a buffer that is read elsewhere",
        "other values",
        "leaves it alone and says so: whoever reads the buffer would find nothing in it",
        graphs.buffer_read_elsewhere,
        (INTO, INTO),
    ),
    Parting(
        "a shard written in place between two all-gathers of a bucket",
        "other values",
        "gathers behind the write, as the program says",
        graphs.written_between,
        (GATHER,),
    ),
    Parting(
        "the same, written through an alias",
        "other values",
        "follows storages, not nodes",
        graphs.alias_written_between,
        (GATHER,),
    ),
    Parting(
        "a gradient overwritten before the bucket's last reduce-scatter",
        "other values",
        "packs it before it is overwritten",
        graphs.gradient_overwritten,
        (SCATTER,),
        newest="right",
    ),
    Parting(
        "a reduce-scatter of a reduce-scatter on one group",
        "raises",
        "one launch for each step of the chain, which is as few as there can be",
        graphs.reduced_twice,
        (SCATTER, SCATTER),
        newest="right",
    ),
    Parting(
        "an all-gather of an all-gather on one group",
        "raises",
        "the same",
        graphs.gathered_twice,
        (GATHER, GATHER),
        newest="other values",
    ),
    Parting(
        "HSDP: reduce-scatters in a row of ranks, all-reduced across rows",
        "raises",
        "one launch of each kind",
        graphs.scattered_then_reduced,
        (SCATTER, REDUCE),
        on_halves=True,
        newest="right",
    ),
    Parting(
        "parameters sharded over two groups, gathered over one and then the other",
        "raises",
        "one launch on each group",
        graphs.gathered_on_two_groups,
        (GATHER, GATHER),
        on_halves=True,
        newest="other values",
    ),
    Parting(
        "two parameters sharded over two groups in opposite nesting",
        "raises",
        "three launches: merging both pairs would let each bucket wait for the other",
        graphs.nested_the_other_way,
        (GATHER, GATHER, GATHER),
        on_halves=True,
        newest="other values",
    ),
    Parting(
        "a reduced gradient that is read before the bucket's last reduce-scatter",
        "raises",
        "moves the reader behind the merged wait",
        graphs.read_early,
        (SCATTER,),
        newest="right",
    ),
    Parting("a launch that is waited for twice", "raises", "both waits get the one result", graphs.two_waits, (GATHER,)),
    Parting("collectives that are coalesced already", "raises", "they join the bucket", graphs.coalesced_before, (GATHER,)),
    Parting(
        'two dtypes and odd element counts, with `bucket_mode="custom_ops_multidtype"`',
        "merges nothing",
        "one launch, in which each member begins where its dtype may",
        graphs.odd_counts,
        (GATHER,),
        mode="custom_ops_multidtype",
    ),
    Parting(
        "all-reduces, as DDP has them", "does nothing", "merges them", graphs.gradients_all_reduced, (REDUCE,), newest="right"
    ),
    Parting(
        "reduced gradients that feed an optimizer in the graph",
        "does nothing",
        "merges them: it does not matter where a result goes",
        graphs.gradients_to_an_optimizer,
        (SCATTER,),
    ),
    Parting(
        "reduced gradients that are added, as of a layer used twice",
        "does nothing",
        "merges them",
        graphs.gradients_added,
        (SCATTER,),
    ),
    Parting(
        "a model inside another module",
        "does nothing",
        "what all modules begin with is no part of their names",
        graphs.in_module("net.a"),
        (GATHER,),
    ),
    Parting(
        "a model that is not called `self` in its graph",
        "does nothing",
        "the same",
        graphs.in_module("L['model'].a"),
        (GATHER,),
    ),
    Parting(
        "an entry that matches no module",
        "does nothing",
        "`PlanError` with the names that there are",
        graphs.gathers,
        plan=["b"],
    ),
    Parting("an empty entry", "does nothing", "`PlanError`", graphs.gathers, plan=[[]]),
    Parting(
        "a string in place of a list of entries",
        "does nothing",
        "`PlanError` that shows a list",
        graphs.two_layers,
        plan="layers.0",
    ),
    Parting(
        "a graph without module names", "does nothing", "`PlanError` that says what it looked for", graphs.gathers_without_names
    ),
    Parting(
        "an unknown `bucket_mode`",
        "takes it for the default",
        "`PlanError` with the modes that there are",
        graphs.gathers,
        mode="costum_ops",
    ),
    Parting(
        "forward and backward in one graph",
        "one bucket for both directions",
        "a bucket for each: one bucket keeps every parameter gathered in between, as if nothing were resharded",
        graphs.both_directions,
        (GATHER, GATHER),
    ),
)


def table() -> str:
    """What docs/explanation/beside-torch.md shows of :data:`PARTINGS`."""
    rows = [f"| {one.name} | {' | '.join(map(one.of, VERSIONS))} | {one.ours} |" for one in PARTINGS]
    head = f"| graph or plan | {' | '.join(f'torch {version}' for version in VERSIONS)} | ours |"
    return "\n".join([head, f"|---|{'---|' * len(VERSIONS)}---|", *rows])
