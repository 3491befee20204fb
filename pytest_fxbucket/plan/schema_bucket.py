"""The tables of a plan file that say what a pass makes of the step: a dataclass for each, a field for each key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_fxbucket.plan.entries import Entry, entry_list
from pytest_fxbucket.plan.rules import (
    callable_name,
    caps,
    keyword_arguments,
    number,
    one_of,
    passes,
    switch,
    whole,
)
from pytest_fxbucket.plan.table_rules import Places, entry_pairs


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
            "what shares a bucket: an entry; neighbours up to `cap_mb`, whatever module they are of; what stays hidden as one "
            "launch, within entries or, without `plan`, across modules",
            "plan",
            "size",
            "overlap",
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

    @property
    def has_entries(self) -> bool:
        """Whether buckets are told by entries, each or within them."""
        return self.by == "plan" or (self.by == "overlap" and bool(self.plan))

    @property
    def root(self) -> str:
        """Name of the entry that has what no other one has; empty where parameters stay unplanned, or may not."""
        return "root" if self.unplanned == "root" else ""


@dataclass(frozen=True, slots=True)
class Overlap:
    """``[overlap]``: where launches and waits stand."""

    schedule: str = field(
        default="manual",
        metadata=one_of(
            "who says where: the keys below, or, simulated on `[cluster]`, the least exposed time within the limits `max_...`",
            "manual",
            "auto",
        ),
    )
    max_memory_increase: float | None = field(
        default=None,
        metadata=number("`auto`: how much more may live at the peak than before the pass, as a share of that", least=0),
    )
    max_memory_increase_gb: float | None = field(
        default=None, metadata=number("`auto`: the same in 2**30 bytes; of both the smaller one holds", least=0)
    )
    max_in_flight_gb: float | None = field(
        default=None,
        metadata=number("`auto`: collectives that were launched and not waited for, at once, in 2**30 bytes", least=0),
    )
    max_prefetch: int | None = field(
        default=None, metadata=whole("`auto`: all-gathers that were launched and not waited for, at once", least=1)
    )
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
        metadata=one_of(
            "which all-gathers run on a process group of their own, where they do not queue behind reductions: none, all, "
            "those of backward",
            "same",
            "own",
            "backward",
        ),
    )
    launch_at: Places = field(
        default_factory=dict,
        metadata=entry_pairs(
            "by hand: the key's all-gather is launched where the value's compute starts, whatever `prefetch` says"
        ),
    )
    wait_before: Places = field(
        default_factory=dict,
        metadata=entry_pairs(
            "by hand: the key's reduction is waited for right before the value's compute, whatever `defer_reduce` says"
        ),
    )


@dataclass(frozen=True, slots=True)
class Passes:
    """``[pass]``: the passes under check."""

    of: tuple[str, ...] = field(
        default=("manual",),
        metadata=passes(
            'the passes under check, run in this order: `"manual"` is ours, `"torch"` torch\'s; a `callable(gm, '
            "module_bucket_plans) -> GraphModule` is anybody's; `--fxbucket-pass` runs others instead",
            in_order=True,
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
