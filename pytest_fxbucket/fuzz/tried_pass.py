"""The pass that is tried: how it is called, and which options it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.compat import torch_pass
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.fuzz.crossing import NAME, crossed, refuses
from pytest_fxbucket.fuzz.our_pass import any_seconds, run_pass, transformed
from pytest_fxbucket.passes.auto.headroom import TogetherError
from pytest_fxbucket.plan.factories import first_on_path, import_callable

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.fuzz.trial import Trial

_ALONE = "by itself"
_KEYWORDS = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class TriedPass:
    """A pass by its name in options."""

    name: str
    function: Callable[..., Any]
    keywords: frozenset[str]
    """Keyword arguments that it takes."""
    modules: tuple[str, ...] = ()
    """Python modules that register operators of the graphs that it gives."""

    @property
    def is_ours(self) -> bool:
        """Whether it is this package's own, with every key of a plan."""
        return self.name == "manual"

    @property
    def takes_plan(self) -> bool:
        """Whether it is given the plan's entries; a pass with ``max_in_flight_gb`` schedules by itself, as torch's does."""
        return "max_in_flight_gb" not in self.keywords

    def run(self, graph_module: fx.GraphModule, trial: Trial) -> Any:
        """What the pass gives for ``graph_module``, with its groups in place; raises what it raises."""
        options = dict(trial.options)
        if self.is_ours:
            graph_module, entries = transformed(graph_module, options.pop("transforms", ())), options.pop(NAME, None)
            run_pass(graph_module.graph, trial.plan, **options)
            graph_module.recompile()
            return graph_module if entries is None else crossed(graph_module, entries)
        if "costs" in options:
            seconds = any_seconds(options.pop("costs"))
            # torch's scheduler takes milliseconds. A size that it asks with is a collective of that many bytes, as 0 for its
            # latency.
            options["custom_runtime_estimation"] = lambda node, size: 1e3 * seconds(node) if size is None else 1e-3
        return self.function(graph_module, *([trial.plan] if self.takes_plan else []), **options)

    def may_refuse(self, trial: Trial, error: BaseException) -> bool:
        """Whether ``error`` is a refusal and no fault: a sentence that says what this program cannot be given."""
        if trial.crosses and refuses(error):
            return True
        by_hand = bool({"launch_at", "wait_before"} & trial.options.keys())
        # Of two modules that gather one parameter, a transformation may have left one without a launch.
        is_merged = "transforms" in trial.options and "is a module without collectives" in str(error)
        return self.is_ours and isinstance(error, PlanError if by_hand or is_merged else TogetherError)


def subject_of(name: str) -> TriedPass:
    """The pass ``name``: manual, torch or module:callable, found from the working folder.

    Raises PlanError for one that cannot be imported, or that cannot be called.
    """
    if name == "manual":
        return TriedPass(name, run_pass, frozenset())
    if name == "torch":
        return TriedPass(name, torch_pass.torch_manual_overlap_bucketing, frozenset({"bucket_mode"}), (torch_pass.OPERATORS,))
    with first_on_path([Path.cwd()]):
        function = import_callable(name, f"pass {name}")
    module = name.partition(":")[0]
    # A pass of torch gives graphs with operators of torch's own, which another module than the pass's registers.
    modules = (torch_pass.OPERATORS,) if module.startswith(("torch.", "pytest_fxbucket.compat.")) else (module,)
    return TriedPass(name, function, _keywords(name, function), modules)


def _keywords(name: str, function: Callable[..., Any]) -> frozenset[str]:
    """Keyword arguments of ``function``; PlanError if it takes no graph and plan, or no graph alone where it schedules."""
    try:
        taken = signature(function)
    except (TypeError, ValueError):
        return frozenset()
    found = frozenset(one.name for one in taken.parameters.values() if one.kind in _KEYWORDS)
    try:
        taken.bind(*(["graph"] if "max_in_flight_gb" in found else ["graph", "plan"]))
    except TypeError as error:
        raise PlanError(f"pass {name} cannot be called as (gm, plans): {error}") from None
    return found
