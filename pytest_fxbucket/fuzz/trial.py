"""A program, and what a pass is asked to make of it; plans and options by a few choices, which fit any program."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.cost.costs import launched_bytes
from pytest_fxbucket.fuzz.crossing import NAME, over_calls
from pytest_fxbucket.fuzz.inputs_and_outputs import has_symbolic
from pytest_fxbucket.fuzz.our_pass import fit, run_pass
from pytest_fxbucket.fuzz.program import copied, fake_groups, step_of
from pytest_fxbucket.graph import collectives

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from pytest_fxbucket.fuzz.drawing import Drawing
    from pytest_fxbucket.fuzz.program import Program


@dataclass(frozen=True)
class Trial:
    """A legal program, a plan and options; a pass that changes what the program computes is wrong."""

    program: Program
    """With the world, and the process groups that the graph names."""
    graph_module: fx.GraphModule
    """What ``program.returns`` gave."""
    plan: Any = ("a",)
    """Entries as passes take them: module FQNs, or lists of FQNs that share a bucket."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the pass is given by keyword; ours also ``costs``, a number that says which seconds nodes take,
    ``transforms``, names of transformations that come before it, and ``next_iteration``, entries whose reductions and updates
    move to the next call behind it."""
    wrong: str = ""
    """What is wrong with plan or options, in words: a pass must refuse it. Empty: nothing is."""

    @property
    def crosses(self) -> bool:
        """Whether work is to go from call to call."""
        return NAME in self.options

    @cached_property
    def before(self) -> fx.GraphModule:
        """The graph that the one after the pass is compared with: the program, or several calls of it if work crosses them."""
        return over_calls(step_of(self.graph_module)) if self.crosses else self.graph_module

    def of(self, graph_module: fx.GraphModule) -> Trial:
        """The same trial with another graph."""
        return replace(self, graph_module=graph_module)


# Plans and options by a few choices, which are made among the entries that a program turns out to have.


MB = 1 << 20
PLANS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("a", "b", "c"),),
    (("a",), ("b",), ("c",)),
    (("a", "b"), ("c",)),
    (("b",), ("a",)),
    (("c",),),
)
"""Entries, each of one module or several."""
BYTES = (0, 60, 200, 1000, 20_000)
"""Caps; 0: none."""
WRONG: dict[str, Callable[[list[list[str]]], Any]] = {
    "an entry that matches no module": lambda plan: [*plan, ["nowhere"]],
    "an empty entry": lambda plan: [*plan, []],
    "a string in place of a list of entries": lambda plan: plan[0][0],
    "a module in two entries": lambda plan: [*plan, list(plan[0])],
    "a graph without module names": lambda plan: plan,
    "an unknown bucket_mode": lambda plan: plan,
}
"""Ways in which a plan may be wrong, in words, and a function that makes such a plan of a right one."""
_BOTH = ("by", "enabled", "dtypes", "layout", "packer", "gather_group", "insert_overlap_deps")
_MANUAL = (*_BOTH, "prefetch", "defer_reduce", "updates", "transforms")
_AUTO = (*_BOTH, "schedule", "max_prefetch")


@dataclass(frozen=True)
class PlanChoice:
    """A plan: which modules share an entry, and how buckets and overlap are to be."""

    plan: int = 0
    by: str = "plan"
    caps: tuple[int, ...] = (0,)
    dtypes: str = "separate"
    enabled: bool = True
    layout: str = "registration"
    packer: str = "default"
    """A packer other than the default is given for buckets of one dtype only, and handles no others."""
    prefetch: int = 1
    defer_reduce: bool = True
    gather_group: str = "same"
    insert_overlap_deps: bool = False
    updates: str = "last"
    launch_at: tuple[int, ...] = ()
    """Which entry is launched, at the compute of which other, and whether in backward, by number; empty: by ``prefetch``."""
    wait_before: tuple[int, ...] = ()
    transforms: tuple[str, ...] = ()
    """Transformations before the pass."""
    moved: tuple[int, ...] = ()
    """Which entries are reduced and updated in the next call, of a whole training step."""
    schedule: str = "manual"
    max_prefetch: int | None = None
    in_flight: float | None = None
    """What may be in flight, as a multiple of the largest collective that the pass makes without this limit."""
    max_memory_increase: float | None = None
    """Given only where nothing is merged, since buckets may need more memory."""
    max_memory_increase_gb: float | None = None
    """Given only there, too."""
    costs: int = 0
    """Which seconds nodes take, for schedules that go by them."""
    keywords: Mapping[str, Any] | None = None
    """Of a pass that is not ours: its own options, and none of the above but the plan."""
    wrong: str = ""
    """One of :data:`WRONG`."""

    def entries(self, modules: Sequence[str]) -> list[list[str]]:
        """The plan's entries, as far as they name modules that have launches; all in one if that leaves none."""
        named = [[name for name in entry if name in modules] for entry in PLANS[self.plan]]
        return [entry for entry in named if entry] or [sorted(set(modules))]

    def options(self, entries: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Options of ManualPass that differ from the default; ``in_flight`` is left to :func:`_limited`."""
        automatic = self.schedule == "auto"
        names: tuple[str, ...] = _AUTO if automatic else _MANUAL
        names += ("max_memory_increase", "max_memory_increase_gb") if automatic and not self.enabled else ()
        found = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(_DEFAULT, name)}
        if self.dtypes == "mixed":
            found.pop("packer", None)
        caps = self.caps[:1] if automatic else self.caps
        if caps != (0,):
            found["cap_mb"] = tuple(size / MB for size in caps)
        if automatic or self.by == "overlap":
            found["costs"] = self.costs
        for name, choice in (("launch_at", self.launch_at), ("wait_before", self.wait_before)):
            if choice and not automatic and self.by == "plan":
                found[name] = _places(choice, ["+".join(entry) for entry in entries])
        return found

    def _moving(self, plan: Sequence[Sequence[str]], trained: Collection[str]) -> list[list[str]]:
        """Of the plan's entries, and of modules that none has, those that move, as far as they are ``trained``."""
        others = [[name] for name in sorted(trained) if not any(name in entry for entry in plan)]
        entries = [found for entry in plan if (found := [name for name in entry if name in trained])] + others
        return [entries[place] for place in sorted({number % len(entries) for number in self.moved})]

    def trial(self, drawing: Drawing) -> Trial:
        """The program of ``drawing``, finished, with this plan."""
        graph_module = drawing.finish()
        return self.of(drawing.program, graph_module, [module.removeprefix(drawing.inside) for module in drawing.modules])

    def of(self, program: Program, graph_module: fx.GraphModule, modules: Sequence[str]) -> Trial:
        """``program``, which gave ``graph_module``, with this plan; ``modules`` have launches."""
        if has_symbolic(graph_module) and self.packer != "default":  # users_packer is written for sizes that are numbers
            return replace(self, packer="default").of(program, graph_module, modules)
        if has_symbolic(graph_module) and (self.schedule == "auto" or self.by == "overlap"):
            return replace(self, schedule="manual", by="plan", in_flight=None).of(
                program, graph_module, modules
            )  # it goes by sizes
        if not fit(self.transforms, graph_module.graph, program.world):
            return replace(self, transforms=()).of(program, graph_module, modules)
        plan: Any = self.entries(modules)
        options = self.options(plan) if self.keywords is None else dict(self.keywords)
        trained = {one.fqn.partition(".")[0] for one in step_of(graph_module).parameters}
        if self.moved and trained:
            options[NAME] = self._moving(plan, trained)
        if self.wrong:
            plan = WRONG[self.wrong](plan)
        if self.wrong == "a graph without module names":
            for node in graph_module.graph.nodes:
                node.meta.pop("nn_module_stack", None)
                node.meta.pop("fwd_nn_module_stack", None)
        if self.wrong == "an unknown bucket_mode":
            options["bucket_mode"] = "costum_ops"  # a slip, as people make it
        found = Trial(program, graph_module, plan, options, self.wrong)
        return found if self.in_flight is None else _limited(found, self.in_flight)


_DEFAULT = PlanChoice()


def _places(choice: Sequence[int], names: Sequence[str]) -> dict[str, dict[str, str]]:
    which, where, backward = choice
    return {"backward" if backward else "forward": {names[which % len(names)]: names[where % len(names)]}}


def _limited(trial: Trial, share: float) -> Trial:
    """``trial`` with ``max_in_flight_gb``: ``share`` of the largest collective, so that none alone is above it."""
    made = copied(trial.graph_module)
    with fake_groups(trial.program.world, trial.program.groups):
        run_pass(made.graph, trial.plan, **trial.options)
    largest = max((launched_bytes(node) for node in made.graph.nodes if collectives.launch_kind(node)), default=1)
    return replace(trial, options={**trial.options, "max_in_flight_gb": share * largest / (1 << 30)})
