"""The tables of a plan file that say what step is traced: a dataclass for each, a field for each key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_fxbucket.plan.entries import Entry, entry_list
from pytest_fxbucket.plan.pipeline_schedules import SCHEDULES
from pytest_fxbucket.plan.rules import (
    callable_name,
    keyword_arguments,
    number,
    one_of,
    switch,
    whole,
)
from pytest_fxbucket.plan.selectors import GatherAgain
from pytest_fxbucket.plan.table_rules import Path as InputPath
from pytest_fxbucket.plan.table_rules import (
    model_inputs,
    module_paths,
    parameter_groups,
    reshard,
    tp_styles,
)
from pytest_fxbucket.words import MOST_RANKS

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MAY_BE_IDLE = entry_list(
    "parameters whose gradients may be zero, on every rank in every step: of experts that may get no token, or by the model's "
    "design; bitwise learns nothing about those that are, and says so; it fails where another's is zero"
)


@dataclass(frozen=True, slots=True)
class Model:
    """``[model]``: the model, its batches and its loss."""

    factory: str = field(metadata=callable_name("`callable(**args) -> torch.nn.Module`, seeded, the same on every rank"))
    batch: str = field(
        metadata=callable_name(
            "`callable(rank, step)` -> tuple or dict, with tensors at any depth: the model gets what its forward takes, of a "
            "tuple the first items, of a dict the keys by name, and the loss the rest, see below; differs by rank and step; "
            "ranks of one tp group get one batch, those of one cp group parts of one, so `rank` counts those groups"
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
    may_be_idle: tuple[Entry, ...] = field(default=(), metadata=_MAY_BE_IDLE)


@dataclass(frozen=True, slots=True)
class Graph:
    """``[graph]``: graphs that someone else traced."""

    factory: str = field(
        metadata=callable_name(
            "instead of `[model]`, graphs that somebody else traced, see below: `callable() -> TracedStep`, called on each rank"
        )
    )
    may_be_idle: tuple[Entry, ...] = field(default=(), metadata=_MAY_BE_IDLE)


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
        metadata=tp_styles(
            'how linears are parted over `tp`: `"colwise"` by outputs, `"rowwise"` by inputs; and activations between them, '
            'along the sequence: `"scatter"`: the output is cut into parts, `"sequence"`: the module takes and gives parts, '
            '`"gather"`: it takes parts and reads all'
        ),
    )
    cp: int = field(
        default=1,
        metadata=whole(
            "ranks that dimension 1 of the batch's tensors, the sequence, is parted over, and parameters as over `dp_shard`",
            least=1,
            limit=MOST_RANKS,
        ),
    )
    cp_form: str = field(
        default="all_gather",
        metadata=one_of(
            "how attention sees the other ranks' parts: keys and values are gathered, or go from rank to rank, block by block",
            "all_gather",
            "ring",
        ),
    )
    ep: int = field(
        default=1, metadata=whole("ranks, out of those of `dp_shard`, that experts are parted over", least=1, limit=MOST_RANKS)
    )
    ep_plan: tuple[Entry, ...] = field(
        default=(), metadata=entry_list("modules of experts: parameters and input have one row an expert")
    )
    pp: int = field(
        default=1, metadata=whole("ranks that the stages of `[pipeline]` are spread over", least=1, limit=MOST_RANKS)
    )
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
    reshard_after_forward: GatherAgain = field(
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

    @property
    def has_ring(self) -> bool:
        """Whether ranks send to their neighbours along ``cp``."""
        return self.cp > 1 and self.cp_form == "ring"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """``[pipeline]``: the stages that the model is cut into, and how they take turns; ``cuts`` or ``stages``, not both."""

    cuts: tuple[str, ...] = field(
        default=(), metadata=module_paths("modules, in the order of forward, behind each of which a stage ends")
    )
    stages: int | None = field(
        default=None, metadata=whole("instead of `cuts`: how many stages, for cuts to be proposed", least=2, limit=MOST_RANKS)
    )
    balance: str = field(
        default="parameters",
        metadata=one_of(
            "what proposed cuts spread evenly: elements of parameters, FLOPs of forward, or seconds of forward and backward as "
            "measured on this machine",
            "parameters",
            "flops",
            "seconds",
        ),
    )
    schedule: str = field(
        default="1F1B",
        metadata=one_of(
            "which of torch's schedules runs them; `GPipe` and `1F1B` have one stage on each rank of `pp`, `ZBVZeroBubble` and "
            "`DualPipeV` two, there and back, the others as many on each as you like, in a loop",
            *SCHEDULES,
        ),
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
    schedule: str = field(
        default="",
        metadata=callable_name(
            "`callable(optimizer) -> torch.optim.lr_scheduler.LRScheduler`, whose learning rates the steps of `bitwise` and "
            "`eager` have; left out: each shrinks from step to step"
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
            "that the module is given, contiguous unless that is of channels last"
        ),
    )
