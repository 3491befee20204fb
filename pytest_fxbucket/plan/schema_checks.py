"""The tables of a plan file that say what is checked and how ranks are run: a dataclass for each, a field for each key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_fxbucket.backends import CHOICES, PLACES
from pytest_fxbucket.plan.cluster import MemoryLimits, OverlapLimits
from pytest_fxbucket.plan.rules import (
    callable_name,
    check_switch,
    degrees,
    keyword_arguments,
    one_of,
    part,
    passes,
    seconds,
    share,
    some_of,
    table_of,
    whole,
)


@dataclass(frozen=True, slots=True)
class Ring:
    """``[run] ring``: its options; the chunks of NCCL's protocol Simple unless said otherwise."""

    channels: int = field(
        default=4, metadata=whole("parts that a message is split into, each summed round a ring order of its own", least=1)
    )
    chunk_bytes: int = field(
        default=2**21, metadata=whole("bytes of an all-reduce, at most, that one rank is the last to add to", least=16)
    )
    nodes: int = field(
        default=1, metadata=whole("nodes of equally many ranks each; a ring goes through one after the other", least=1)
    )


@dataclass(frozen=True, slots=True)
class Run:
    """``[run]``: how ranks are run."""

    backend: str = field(
        default="auto",
        metadata=one_of(
            'process group back end, see below; `"auto"`: `"nccl"` where ranks have GPUs or can share them, else `"gloo"`',
            *CHOICES,
        ),
    )
    world: Mapping[str, int] = field(
        default_factory=dict,
        metadata=degrees(
            "a smaller mesh for bitwise, of at most 64 ranks; dimensions left out are as in `[parallel]`, and none can be 1: "
            "along it there would be nothing to compare"
        ),
    )
    steps: int = field(default=3, metadata=whole("steps that bitwise runs", least=1))
    seed: int = field(
        default=0, metadata=whole("seed of the weights and of random operators in the step", least=0, limit=2**63 - 1)
    )
    timeout_s: float = field(default=120.0, metadata=seconds("longest that ranks may take"))
    reduce: str = field(
        default="rank_order",
        metadata=one_of(
            "the order in which `eager` adds what ranks send: by rank, or as NCCL's ring does, where it depends on where an "
            "element lies in its bucket; bitwise adds by rank",
            "rank_order",
            "ring",
        ),
    )
    ring: Ring | None = field(default=None, metadata=table_of('the ring of `reduce = "ring"`', Ring))
    compiler: str = field(
        default="none",
        metadata=one_of(
            "what bitwise compiles both steps with, as whole graphs, before it runs them",
            "none",
            "aot_eager",
            "inductor",
        ),
    )
    ranks_per_gpu: int = field(
        default=0,
        metadata=whole(
            "ranks that share a GPU at most, which NCCL lets them from 2.30 on; 0: as many as must", least=0, limit=PLACES
        ),
    )


@dataclass(frozen=True, slots=True)
class Eager:
    """``[eager]``: the step that the check of that name holds the bucketed graph against; left out, torch's own."""

    factory: str | None = field(
        default=None,
        metadata=callable_name(
            "a trainer's own step instead of torch's: `callable(mesh, **args)` -> what has `model`, `optimizers`, "
            "`backward(batch)` and `update()`, see below; called on every rank"
        ),
    )
    args: Mapping[str, object] = field(default_factory=dict, metadata=keyword_arguments("keyword arguments of factory"))
    rounds_otherwise: tuple[str, ...] = field(
        default=(),
        metadata=some_of(
            "why torch's own step rounds otherwise by design, see below: there it goes the graph's way, and all is held to it "
            "bit for bit; one that the model does not have is an error",
            "reused_unit",
            "rowwise_bias",
            "ddp_buckets",
            "fused_rnn",
            "gradient_dtype",
            "shared_input",
        ),
    )


@dataclass(frozen=True, slots=True)
class Benchmark:
    """``[checks] benchmark`` as a table: how step time is measured and judged."""

    threshold: float = field(default=0.03, metadata=part("a smaller loss of step time is no regression"))
    precision: float = field(
        default=0.01,
        metadata=part("how well bucketed/unbucketed is to be known; samples end when it is, 0: when the time is over"),
    )
    budget_s: float = field(
        default=20.0,
        metadata=seconds("seconds of warm-up and samples; at least 8 rounds of each are run in each of 4 sets of processes"),
    )
    against: tuple[str, ...] = field(
        default=(), metadata=passes('passes that are timed beside the plan\'s: `"torch"` or `"module:callable"`')
    )


@dataclass(frozen=True, slots=True)
class Mutation:
    """``[checks] mutation`` as a table: how many broken graphs the other checks must find."""

    min_score: float = field(
        default=0.98, metadata=share("found of all mutants that are no equivalents, at least: 0.98 for 98 %")
    )
    budget_s: float = field(default=60.0, metadata=seconds("seconds after which no more mutants are made"))
    at_most: int = field(default=100, metadata=whole("mutants that are made at most", least=1))
    seed: int = field(default=0, metadata=whole("gives the places that are broken, where there are more", least=0))


@dataclass(frozen=True, slots=True)
class Checks:
    """``[checks]``: which items the plan gives."""

    audit: bool = field(default=True, metadata=check_switch("the graph keeps what the plan promises"))
    golden: bool = field(default=True, metadata=check_switch("the schedule is the reviewed one"))
    collectives: bool = field(default=True, metadata=check_switch("all ranks launch the same, and nothing can hang"))
    same: bool = field(
        default=True,
        metadata=check_switch("every output and written input stands for the expression that it stood for before the pass"),
    )
    overlap: OverlapLimits | Literal[False] = field(
        default=False,
        metadata=check_switch("communication is hidden by compute in the step simulated on `[cluster]`", OverlapLimits),
    )
    memory: MemoryLimits | Literal[False] = field(
        default=False,
        metadata=check_switch("what a rank holds at once in the step simulated on `[cluster]` is within limits", MemoryLimits),
    )
    bitwise: bool = field(default=True, metadata=check_switch("bucketed and unbucketed steps give the same bits"))
    eager: bool = field(
        default=True,
        metadata=check_switch("the bucketed step gives the bits of torch's own, of FSDP2 or DDP"),
    )
    mutation: Mutation | Literal[False] = field(
        default=False, metadata=check_switch("the checks above find it where the graph is broken on purpose", Mutation)
    )
    benchmark: Benchmark | Literal[False] = field(
        default=False, metadata=check_switch("step time, bucketed beside unbucketed, and against stored runs", Benchmark)
    )
