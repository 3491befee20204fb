"""The schema of a plan file: a dataclass for each table, a field for each key.

The schema is the type: an unknown key is one that is no field, and each field's metadata holds the rule that reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pytest_fxbucket.limits import MOST_RANKS
from pytest_fxbucket.plan.benchmark import Benchmark
from pytest_fxbucket.plan.entries import Entry, entry_list
from pytest_fxbucket.plan.groups import parameter_groups
from pytest_fxbucket.plan.inputs import Path as InputPath
from pytest_fxbucket.plan.inputs import model_inputs
from pytest_fxbucket.plan.places import Places, places
from pytest_fxbucket.plan.reshard import Asked, reshard
from pytest_fxbucket.plan.ring import Ring
from pytest_fxbucket.plan.rules import (
    DEGREES,
    Rule,
    callable_name,
    caps,
    check_switch,
    degrees,
    keyword_arguments,
    number,
    one_of,
    seconds,
    some_of,
    switch,
    table_of,
    whole,
)
from pytest_fxbucket.plan.tp_plan import linear_styles

__all__ = [
    "Benchmark",
    "Bucket",
    "Checks",
    "Eager",
    "Entry",
    "Graph",
    "Key",
    "Model",
    "Optimizer",
    "Overlap",
    "Override",
    "Parallel",
    "Plan",
    "Ring",
    "Run",
    "Step",
    "Transform",
    "keys",
    "may_be_several",
    "rule_of",
    "tables",
]

_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True)
class Model:
    """``[model]``: the model, its batches and its loss."""

    factory: str = field(metadata=callable_name("`callable(**args) -> torch.nn.Module`, seeded, the same on every rank"))
    batch: str = field(
        metadata=callable_name(
            "`callable(rank, step)` -> tuple or dict, with tensors at any depth: the model gets what its forward takes, of a "
            "tuple the first items, of a dict the keys by name, and the loss the rest, see below; differs by rank and step; "
            "ranks of one tp group get one batch, so `rank` counts those groups"
        )
    )
    args: Mapping[str, object] = field(default_factory=dict, metadata=keyword_arguments("keyword arguments of factory"))
    loss: str | None = field(
        default=None,
        metadata=callable_name(
            "`callable(output, targets)` -> scalar, where targets are what the model does not take of the batch; "
            "`callable(output, batch)`, or where nothing is left: all of it; left out: the loss in the output, or the output "
            "itself"
        ),
    )
    inputs: tuple[InputPath, ...] = field(
        default=(),
        metadata=model_inputs(
            "what of the batch the model gets: keys, by name (by position what forward has no name for), or positions, `[0]`; "
            '`"0.ids"`: `ids` in the first item, `"0.*"`: all in it; left out: what forward takes'
        ),
    )


@dataclass(frozen=True, slots=True)
class Graph:
    """``[graph]``: graphs that someone else traced."""

    factory: str = field(
        metadata=callable_name(
            "instead of `[model]`, graphs that somebody else traced: `callable() -> TracedStep`, called on every rank"
        )
    )


@dataclass(frozen=True, slots=True)
class Parallel:
    """``[parallel]``: the mesh of the real job."""

    mode: str = field(
        default="fully_shard",
        metadata=callable_name(
            'what is sharded: `"fully_shard"`: parameters on dimension 0, gathered where a module first reads them; '
            '`"replicate"`: nothing, gradients are all-reduced, as DDP; `"hybrid_shard"`: sharded within, copied between; '
            "a callable gives a mode of your own: `callable(parallel, mesh) -> Mode`",
            "fully_shard",
            "replicate",
            "hybrid_shard",
        ),
    )
    dp_shard: int = field(default=1, metadata=whole("ranks that a parameter is sharded over", least=1, limit=MOST_RANKS))
    dp_replicate: int = field(default=1, metadata=whole("copies of the model, sharded or whole", least=1, limit=MOST_RANKS))
    tp: int = field(default=1, metadata=whole("ranks that the modules of `tp_plan` are parted over", least=1, limit=MOST_RANKS))
    tp_plan: Mapping[str, str] = field(
        default_factory=dict,
        metadata=linear_styles('how linears are parted over `tp`: `"colwise"` by outputs, `"rowwise"` by inputs'),
    )
    ep: int = field(
        default=1, metadata=whole("ranks, out of those of `dp_shard`, that experts are parted over", least=1, limit=MOST_RANKS)
    )
    ep_plan: tuple[Entry, ...] = field(
        default=(), metadata=entry_list("modules of experts: parameters and input have one row an expert")
    )
    pp: int = field(default=1, metadata=whole("pipeline stages", least=1, most=1))
    param_dtype: str | None = field(
        default=None,
        metadata=one_of(
            "dtype of all-gathers and of what modules read; float inputs of the model and of each module that an entry names "
            "are cast to it, as FSDP2 does; left out: the parameter's own",
            *_DTYPES,
            omit=True,
        ),
    )
    reduce_dtype: str | None = field(
        default=None,
        metadata=one_of("dtype of gradient reductions; left out: the gradient's own", *_DTYPES, omit=True),
    )
    reshard_after_forward: Asked = field(
        default=None,
        metadata=reshard(
            "parameters are gathered again in backward, or kept; a table says it by entry; left out, and of entries that the "
            'table does not name, as FSDP2: all but the entry that forward reads last, and what `unplanned = "root"` holds'
        ),
    )
    reduce_order: str = field(
        default="scatter_first",
        metadata=one_of("which of `hybrid_shard`'s two reductions comes first", "scatter_first", "replicate_first"),
    )


@dataclass(frozen=True, slots=True)
class Step:
    """``[step]``: what a step does beside forward and backward."""

    microbatches: int = field(
        default=1, metadata=whole("equal parts of a batch, one after the other; gradients are reduced once", least=1)
    )
    checkpoint: tuple[Entry, ...] = field(
        default=(), metadata=entry_list("modules whose forward is computed again in backward")
    )
    clip_norm: float = field(
        default=0.0, metadata=number("largest global norm of the gradients that the optimizer sees, 0: any", least=0)
    )
    reuse_layers: bool = field(
        default=False,
        metadata=switch("trace layers that are alike once and repeat them", unbuilt="layers are traced whole"),
    )


@dataclass(frozen=True, slots=True)
class Optimizer:
    """``[optimizer]``, or ``[[optimizer]]`` for each of several: what updates parameters in the traced step."""

    factory: str = field(
        metadata=callable_name("`callable(params, **args) -> torch.optim.Optimizer`; several are each under `[[optimizer]]`")
    )
    args: Mapping[str, object] = field(default_factory=dict, metadata=keyword_arguments("keyword arguments of factory"))
    params: tuple[Entry, ...] = field(
        default=(), metadata=entry_list("what it updates; left out: all that no other optimizer has")
    )
    groups: str | tuple[Mapping[str, object], ...] = field(
        default="one",
        metadata=parameter_groups(
            "its parameter groups: one, one for each entry of `bucket.plan`, or those listed, of which one may leave out "
            '`params` and has the rest: `[{ params = ["norm"], weight_decay = 0.0 }, {}]`'
        ),
    )


@dataclass(frozen=True, slots=True)
class Bucket:
    """``[bucket]``: which parameters share a launch."""

    enabled: bool = field(default=True, metadata=switch("merge at all; false only reorders"))
    plan: tuple[Entry, ...] = field(
        default=(),
        metadata=entry_list(
            'entries, one bucket each: `"a.b"` a module, a parameter\'s own FQN, `"layers.[0-3]"` four entries, `"layers.*"` '
            'one for each child, `"norm+output"` (or an array inside the array) one entry of both; left out with `by = "size"`'
        ),
    )
    by: str = field(
        default="plan",
        metadata=one_of(
            "what shares a bucket: an entry, or neighbours up to `cap_mb`, whatever module they are of", "plan", "size"
        ),
    )
    layout: str = field(
        default="registration",
        metadata=one_of(
            "byte order in a bucket: as FSDP2 lays a unit out (as registered, children before a module's own), or as executed",
            "registration",
            "execution",
        ),
    )
    dtypes: str = field(
        default="separate",
        metadata=one_of('`"mixed"`: one all-gather carries several dtypes, as bytes; reductions never do', "separate", "mixed"),
    )
    cap_mb: tuple[float, ...] = field(
        default=(0.0,),
        metadata=caps(
            "largest bucket in 2**20 bytes of the larger of input and output, 0: no cap; a list has one for each entry in turn "
            "(by size: for each bucket), the last for the rest; a member above it stands alone"
        ),
    )
    packer: str = field(
        default="default",
        metadata=callable_name(
            "how members become one tensor; one of your own: see `pytest_fxbucket.passes.packers`", "default"
        ),
    )
    unplanned: str = field(
        default="error",
        metadata=one_of('a parameter in no entry; `"root"`: all such in one bucket, as FSDP2', "error", "allow", "root"),
    )


@dataclass(frozen=True, slots=True)
class Overlap:
    """``[overlap]``: where launches and waits stand."""

    prefetch: int = field(default=1, metadata=whole("entries ahead that an all-gather is launched, 0: where it was", least=0))
    defer_reduce: bool = field(default=True, metadata=switch("reductions are waited for behind the next entry's launches"))
    updates: str = field(
        default="last",
        metadata=one_of("when updates run: after all reductions, or each when its own has ended", "last", "ready"),
    )
    insert_overlap_deps: bool = field(
        default=False, metadata=switch("the order is written into the graph, so that later compilers keep it")
    )
    gather_group: str = field(
        default="same",
        metadata=one_of("process group of all-gathers; on their own they do not queue behind reductions", "same", "own"),
    )
    launch_at: Places = field(
        default_factory=dict,
        metadata=places("by hand: the key's all-gather is launched where the value's compute starts, whatever `prefetch` says"),
    )
    wait_before: Places = field(
        default_factory=dict,
        metadata=places(
            "by hand: the key's reduction is waited for right before the value's compute, whatever `defer_reduce` says"
        ),
    )


@dataclass(frozen=True, slots=True)
class Override:
    """``[override]``, or ``[[override]]`` for each of several: modules that are not traced."""

    module: tuple[Entry, ...] = field(
        default=(), metadata=entry_list("modules that are not traced, by their names; or, instead, `type`")
    )
    type: str | None = field(
        default=None, metadata=callable_name("the class of modules that are not traced, subclasses too; or, instead, `module`")
    )
    by: str = field(
        default="call",
        metadata=callable_name(
            'what stands in their places: `"call"` calls the real module when the step runs; a `callable(module, **args)`, '
            "asked "
            "once for each, gives a sub-graph of your own",
            "call",
        ),
    )
    args: Mapping[str, object] = field(default_factory=dict, metadata=keyword_arguments("keyword arguments of `by`"))
    output: str | None = field(
        default=None,
        metadata=callable_name(
            "`callable(module, *args, **kwargs)` -> what a call gives, of fake tensors; left out: a tensor like the first "
            "that the "
            "module is given"
        ),
    )


@dataclass(frozen=True, slots=True)
class Transform:
    """``[[transform]]``: a change of the whole step; several are done one after the other."""

    name: str = field(
        metadata=callable_name(
            'what is done to the step, in the order of the tables; `"bucket"` is the pass, which is done last if it is not '
            "listed and none must come after it; one of your own: `callable(step, state, **args) -> StepGraph`",
            "bucket",
            "merge_duplicates",
            "add_before_reducing",
            "next_iteration",
        )
    )
    args: Mapping[str, object] = field(
        default_factory=dict, metadata=keyword_arguments("keyword arguments of the transformation")
    )


@dataclass(frozen=True, slots=True)
class Run:
    """``[run]``: how ranks are run."""

    backend: str = field(
        default="auto",
        metadata=one_of(
            'process group back end, see below; `"auto"`: `"nccl"` if there is a GPU for each rank, else `"gloo"`',
            *("auto", "gloo", "gloo:cuda", "nccl", "local", "fake"),
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
    zero_gradients: tuple[Entry, ...] = field(
        default=(),
        metadata=entry_list(
            "parameters whose gradients are zero by the model's design, so that bitwise can check nothing about them; "
            "it fails where another's is zero, or one of these is not"
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
        ),
    )


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
    bitwise: bool = field(default=True, metadata=check_switch("bucketed and unbucketed steps give the same bits"))
    eager: bool = field(
        default=True,
        metadata=check_switch("the bucketed step gives the bits of torch's own, of FSDP2 or DDP"),
    )
    benchmark: Benchmark | Literal[False] = field(
        default=False, metadata=check_switch("step time, bucketed beside unbucketed, and against stored runs", Benchmark)
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan file with one row of its matrix applied, or none; compares by value and can be pickled."""

    path: Path
    matrix_id: str | None = None
    model: Model | None = field(default=None, metadata={"table": Model})
    graph: Graph | None = field(default=None, metadata={"table": Graph})
    parallel: Parallel = field(default_factory=Parallel, metadata={"table": Parallel})
    step: Step = field(default_factory=Step, metadata={"table": Step})
    override: tuple[Override, ...] = field(default=(), metadata={"table": Override, "several": True})
    """Left out: every module is traced."""
    optimizer: tuple[Optimizer, ...] = field(default=(), metadata={"table": Optimizer, "several": True})
    """Left out: the step ends with the reduced gradients."""
    bucket: Bucket = field(default_factory=Bucket, metadata={"table": Bucket})
    overlap: Overlap = field(default_factory=Overlap, metadata={"table": Overlap})
    transform: tuple[Transform, ...] = field(default=(), metadata={"table": Transform, "several": True})
    """Left out: the pass alone."""
    run: Run = field(default_factory=Run, metadata={"table": Run})
    eager: Eager = field(default_factory=Eager, metadata={"table": Eager})
    checks: Checks = field(default_factory=Checks, metadata={"table": Checks})

    @property
    def world_size(self) -> int:
        """Ranks of the real job's mesh."""
        return prod(self.degrees.values())

    @property
    def run_world(self) -> int:
        """Ranks that are really run."""
        return prod(self.run_degrees.values())

    @property
    def degrees(self) -> dict[str, int]:
        """Size of each dimension of the real job's mesh, the outermost first; ``ep`` is a part of ``dp_shard``."""
        return {name: getattr(self.parallel, name) for name in DEGREES}

    @property
    def run_degrees(self) -> dict[str, int]:
        """The same of the mesh that is really run: ``[run] world``, where it says nothing ``[parallel]``."""
        return self.degrees | dict(self.run.world)


class Key(NamedTuple):
    """One key of the plan file.

    ``default`` is ``dataclasses.MISSING`` for a key that must be given; ``choices`` lists every value with a meaning
    (empty if they cannot be listed); ``built`` is False if no value but the default is taken yet.
    """

    table: str
    key: str
    default: object
    choices: tuple[object, ...]
    built: bool


def tables() -> dict[str, type[Any]]:
    """Give the dataclass of each table, by its name in the file."""
    return {spec.name: spec.metadata["table"] for spec in dataclasses.fields(Plan) if "table" in spec.metadata}


def may_be_several(table: str) -> bool:
    """Whether ``table`` may be an array of tables."""
    return bool(Plan.__dataclass_fields__[table].metadata.get("several"))


def rule_of(table: str, key: str) -> Rule:
    """Give the rule of ``[table] key``."""
    rule: Rule = tables()[table].__dataclass_fields__[key].metadata["rule"]
    return rule


def keys() -> Iterator[Key]:
    """Yield every key of the plan file, in the order of the schema."""
    for table, cls in tables().items():
        for spec in dataclasses.fields(cls):
            rule: Rule = spec.metadata["rule"]
            default = spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()
            yield Key(table, spec.name, default, rule.choices, rule.built)
