"""Somebody else's pass: found by name, run on copies, and held to go by nothing but the graph that it is given."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.compat import torch_pass
from pytest_fxbucket.errors import FxbucketError, PassError, text_of
from pytest_fxbucket.graph.counted_anew import renamed
from pytest_fxbucket.graph.movement import is_made_of_others
from pytest_fxbucket.passes.fake_values import fill_in
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.process.elsewhere import elsewhere, only_where_all, say_what_it_goes_by
from pytest_fxbucket.process.state import ProcessState
from pytest_fxbucket.step.portable import digest, encode, own_copy
from pytest_fxbucket.user_frame import user_frame
from pytest_fxbucket.words import some

Plans = Sequence[str | list[str]]
ForeignPass = Callable[[fx.GraphModule, Plans], Any]
_NOT_USERS = frozenset({"torch", "math", "operator", "_operator", "builtins"})
"""Packages whose functions tracers themselves put into graphs."""


@dataclass(frozen=True, slots=True)
class ForeignOutput:
    """What a pass gave."""

    module: fx.GraphModule
    modules: tuple[str, ...]
    """Python modules that register its operators."""
    notes: tuple[str, ...]
    """What it goes by beside the graph, a clause each."""


def run_foreign(name: str, root: fx.GraphModule, plans: Plans, *, twice: bool) -> ForeignOutput:
    """Run the pass ``name`` on a copy of ``root``; with ``twice`` once more, under other circumstances.

    Raises PassError for whatever it raises, for what is no graph, for a graph that runs Python of its own, and for a pass that
    makes another graph of the same one, by chance or since it is tested; PlanError for one that cannot be imported.
    """
    foreign, modules = _pass_named(name)
    before, drawn = _globals_of(name), ProcessState.take()
    module = _called(name, foreign, own_copy(root), plans)
    _refuse_python(name, root, module)
    fill_in(module.graph, root.graph)  # what a pass does not say would cost nothing where time and memory are estimated
    notes = [f"the pass keeps {one} from call to call" for one in _changed(before, _globals_of(name))]
    notes += ["the pass draws random numbers"] if drawn.has_drawn() else []
    known = {node.target for node in root.graph.nodes}
    own = {str(node.target) for node in module.graph.nodes if node.target not in known and is_made_of_others(node)}
    notes += [f"{some(sorted(own))} taken for what it is made of as it is traced"] if own else []
    if twice:
        notes += _of_circumstances(name, foreign, root, plans, _digest(module, modules), modules)
    return ForeignOutput(module, modules, tuple(notes))


def _pass_named(name: str) -> tuple[ForeignPass, tuple[str, ...]]:
    if name == "torch":
        return torch_pass.torch_manual_overlap_bucketing, (torch_pass.OPERATORS,)
    return import_callable(name, f"pass {name}"), (name.partition(":")[0],)


def _called(name: str, foreign: ForeignPass, given: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    try:
        result = foreign(given, deepcopy(plans))  # a list that a run may change is its own
    except (FxbucketError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a pass may end its process, or skip a test
        frame = user_frame(error)
        where = f" at {frame}" if frame else ""
        raise PassError(f"pass {name} raised {type(error).__name__}{where}: {text_of(error)[:400]}") from error
    if not isinstance(result, fx.GraphModule):
        raise PassError(f"pass {name} returned a {type(result).__name__}, expected a GraphModule")
    return result


def _refuse_python(name: str, before: fx.GraphModule, after: fx.GraphModule) -> None:
    """Refuse Python functions that the pass put into the graph: no check of a first step sees what they do in a later one."""
    known = {node.target for node in before.graph.nodes}
    for node in after.graph.nodes:
        target = node.target
        if not isinstance(target, types.FunctionType) or target in known:
            continue
        if (target.__module__ or "").partition(".")[0] not in _NOT_USERS:
            raise PassError(
                f"pass {name} lets the graph call {target.__module__}.{target.__qualname__} at {node.name}, which is Python "
                "that may do another thing in a later step; register it as an operator (torch.library.custom_op)"
            )


# Does it go by the graph alone?


def _of_circumstances(
    name: str, foreign: ForeignPass, root: fx.GraphModule, plans: Plans, first: str, modules: tuple[str, ...]
) -> list[str]:
    """Clauses on what the pass goes by beside the graph's structure, as far as it may; raises for the rest.

    It may read names of nodes, though only those of inputs say anything: these stay as they are in all runs.
    """

    def again(given: fx.GraphModule) -> str:
        return _digest(_called(name, foreign, given, plans), modules)

    # One run under all other circumstances and names at once clears most passes. Only if it differs, they are told apart.
    with suppress(PassError), elsewhere():  # what it raises there is told below, with where that was
        if again(_renamed(root)) == first:
            return []
    say_what_it_goes_by(f"pass {name}", first, lambda: again(own_copy(root)))
    if again(_renamed(root)) == first:
        raise only_where_all(f"pass {name}")
    return ["the pass makes another graph where nodes have other names"]


def _renamed(root: fx.GraphModule) -> fx.GraphModule:
    """A copy of ``root`` whose nodes have other names, in the same alphabetical order; those of inputs stay."""
    # In that order, so that a pass that only sorts by names makes the same graph.
    module = own_copy(root)
    places = {node: place for place, node in enumerate(sorted(module.graph.nodes, key=lambda node: node.name))}
    names = {node: f"v{place:07}" for node, place in places.items() if node.op not in ("placeholder", "output")}
    return fx.GraphModule(module, renamed(module.graph, names))


def _digest(module: fx.GraphModule, modules: tuple[str, ...]) -> str:
    return digest(encode(module.graph, module, modules))


def _globals_of(name: str) -> dict[str, Any]:
    """Numbers, texts and containers among the global variables of the pass's own module, as they are now."""
    module = sys.modules.get(name.partition(":")[0]) if ":" in name else None
    plain = (bool, int, float, str, list, dict, set, torch.Tensor)
    # Without a module these are the names of ``object``, all of which begin with two underscores.
    found = {key: value for key, value in vars(module or object).items() if isinstance(value, plain) and key[:2] != "__"}
    return {key: _copy_of(value) for key, value in found.items()}


def _copy_of(value: Any, around: tuple[int, ...] = ()) -> Any:
    """A tensor or containers of its own, also within containers; ``around`` are those that it lies in."""
    if isinstance(value, torch.Tensor) and not around:
        return value.clone()
    if not isinstance(value, (list, dict, set)) or id(value) in around:
        return value
    inside = (*around, id(value))
    if isinstance(value, dict):
        return {key: _copy_of(one, inside) for key, one in value.items()}
    return set(value) if isinstance(value, set) else [_copy_of(one, inside) for one in value]


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in sorted(before) if name in after and not _is_same(before[name], after[name])]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    try:
        return bool(one == other)
    except Exception:  # whatever lies in it cannot be compared, so nobody can say that it changed
        return True
