"""The text of a value that a test compares (graph, step, result of a pass, str), how two texts differ, and who asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import unified_diff
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fxbucket.artifacts import Folder
from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.pytest_plugin.items import PlanRef
from pytest_fxbucket.pytest_plugin.session import fx_session

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.golden.schedule import Schedule
    from pytest_fxbucket.passes.result import Passed
    from pytest_fxbucket.run import PlanRun
    from pytest_fxbucket.step.roles import MeshDim, Phase, StepGraph, Value

Entries = Sequence[str | Sequence[str]]
"""As ``[bucket] plan`` has them."""
_TAKES = "a GraphModule, a Graph, fxbucket_graph, fxbucket_bucketed or a str"


def text_of(given: object, run: PlanRun | None = None, entries: Entries | None = None) -> str:
    """The text of ``given``, which ends in a line feed: a str as it is; of a graph its events and buckets, under plan and mesh.

    ``run`` is the run of the plan in use, if there is one. Its roles, entries and mesh describe its own step, graphs of its
    pass, and graphs with the same inputs as that step's graphs; others are described by what their tracer left.
    ``fxbucket_bucketed`` stands for all graphs of rank 0. ``entries`` group parameters instead of the plan's.

    Raises UsageError for a value without such a text, PlanError for entries that match nothing.
    """
    if isinstance(given, str):
        text = given.replace("\r\n", "\n")
        if not text.isascii():
            _refuse_surrogates(text)
        return text if text.endswith("\n") else text + "\n"
    if run is not None and (made := _of_pass(given, run)):
        return _pass_text(run, made, entries)
    graphs = _graphs(given)
    step = run.step if run is not None else None
    # Another step than the plan's brings roles and a mesh of its own, which the plan's would contradict.
    if (own := _own_step(given)) is not None:
        return _step_text(own, graphs, run if own is step else None, entries)
    if step is not None and (phases := _as_in(step, graphs)) is not None:
        return _step_text(step, phases, run, entries)
    return _bare_text(graphs, entries)


def _of_pass(given: object, run: PlanRun) -> dict[Phase, Passed]:
    """What ``given`` is of that which the pass made on rank 0: all graphs if it is ``run.bucketed``, or one of them."""
    if not run.world.is_passed(0):
        return {}
    passed = run.world.passed(0)
    if given is run.bucketed:
        return dict(passed)
    return {phase: one for phase, one in passed.items() if given is one.graph or given is one.bucketed.graph_module}


def _pass_text(run: PlanRun, made: Mapping[Phase, Passed], entries: Entries | None) -> str:
    from pytest_fxbucket.golden.schedule import schedule_of

    step, world = run.step, run.world
    fqns = [parameter.fqn for parameter in step.parameters]
    entry_of = world.entry_of if entries is None else _entry_of(fqns, entries, step.modules, step.names)
    schedules = {p: schedule_of(one.reading, entry_of, world.dims_of(one.graph)) for p, one in made.items()}
    return _joined(run.name, step.mesh, schedules)


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"character {error.start} of the text, {text[error.start]!r}, cannot be written in UTF-8") from None


def _graphs(given: object) -> dict[Phase, fx.Graph]:
    """Graphs by phase; UsageError if there are none in ``given``."""
    import torch

    from pytest_fxbucket.passes.registry import Bucketed
    from pytest_fxbucket.step.roles import StepGraph

    if isinstance(given, StepGraph):
        return {phase: gm.graph for phase, gm in given.graphs.items()}
    if isinstance(given, (Bucketed, torch.fx.GraphModule)):
        return {"joint": given.graph}
    if isinstance(given, torch.fx.Graph):
        return {"joint": given}
    raise UsageError(f"a value of type {type(given).__name__} has no structure text; expected {_TAKES}")


def _own_step(given: object) -> StepGraph | None:
    from pytest_fxbucket.step.roles import StepGraph

    return given if isinstance(given, StepGraph) else None


def _as_in(step: StepGraph, graphs: Mapping[Phase, fx.Graph]) -> dict[Phase, fx.Graph] | None:
    """``graphs`` by the phase of ``step`` with the same inputs and number of outputs; None unless each has one of its own."""
    phases: dict[object, list[Phase]] = {}
    for phase, gm in step.graphs.items():
        phases.setdefault(_signature(gm.graph), []).append(phase)
    found: dict[Phase, fx.Graph] = {}
    for graph in graphs.values():
        alike = phases.get(_signature(graph), [])
        if len(alike) != 1 or alike[0] in found:
            return None
        found[alike[0]] = graph
    return found


def _signature(graph: fx.Graph) -> tuple[int, tuple[str, ...]]:
    from pytest_fxbucket.graph.ops import returned

    return len(returned(graph.output_node())), tuple(node.name for node in graph.find_nodes(op="placeholder"))


def _step_text(step: StepGraph, graphs: Mapping[Phase, fx.Graph], run: PlanRun | None, entries: Entries | None) -> str:
    """The text under the step's mesh; with ``run``, whose step it is, also with the plan's name, entries and groups."""
    from pytest_fxbucket.graph_view.roles_by_tracer import bare_values, group_names

    schedules = {}
    for phase, graph in graphs.items():
        inputs, outputs = (step.inputs[phase], step.outputs[phase]) if step.has_roles else bare_values(graph)
        dims_of = run.world.dims_of(graph) if run is not None else group_names(graph, step.mesh)
        if run is not None and entries is None:
            entry_of = run.world.entry_of
        else:
            entry_of = _entry_of(_parameters(inputs), entries, step.modules, step.names)
        schedules[phase] = _schedule(graph, inputs, outputs, entry_of, dims_of)
    return _joined(run.name if run is not None else "", step.mesh, schedules)


def _bare_text(graphs: Mapping[Phase, fx.Graph], entries: Entries | None) -> str:
    from pytest_fxbucket.capture.given_graphs import modules_of
    from pytest_fxbucket.graph_view.roles_by_tracer import bare_values, group_names

    schedules = {}
    for phase, graph in graphs.items():
        inputs, outputs = bare_values(graph)
        fqns = _parameters(inputs)
        schedules[phase] = _schedule(
            graph, inputs, outputs, _entry_of(fqns, entries, modules_of(fqns), {fqn: fqn for fqn in fqns}), group_names(graph)
        )
    return _joined("", (), schedules)


def _parameters(inputs: Sequence[Value]) -> list[str]:
    return [value.fqn for value in inputs if value.role == "param"]


def _schedule(
    graph: fx.Graph,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    entry_of: Mapping[str, str],
    dims_of: Mapping[str, str],
) -> Schedule:
    from pytest_fxbucket.golden.schedule import schedule_of
    from pytest_fxbucket.graph.reading import read_graph
    from pytest_fxbucket.passes.keep_order import without_kept_order

    return schedule_of(read_graph(without_kept_order(graph), inputs, outputs), entry_of, dims_of)


def _entry_of(fqns: Sequence[str], entries: Entries | None, modules: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """Entry of each parameter that one of ``entries`` has; without ``entries`` its innermost module."""
    if entries is None:
        return {fqn: fqn.rpartition(".")[0] or fqn for fqn in fqns}
    from pytest_fxbucket.plan.selectors import entry_by_parameter, parse_entries, resolve

    where = "fxbucket_golden(..., plan=...)"
    own = set(fqns)
    of_graph = {name: fqn for name, fqn in names.items() if fqn in own}
    resolution = resolve(parse_entries(entries, where), of_graph, modules, aliases=of_graph, unplanned="allow", where=where)
    return entry_by_parameter(resolution.entries)


def _joined(plan: str, mesh: Sequence[MeshDim], schedules: Mapping[Any, Schedule]) -> str:
    from pytest_fxbucket.golden.text import golden_text

    return golden_text(plan, mesh, dict(schedules))


def difference_lines(given: object, expected: str, text: str, command: str, folder: Folder) -> list[str]:
    """The ``command`` that accepts ``text``, the text of ``given``; then what differs: of a graph in words, and as a diff.

    The command comes first, since pytest shows only the beginning of long explanations. ``folder`` gets all of ``text``, and
    the whole diff if it is cut here.
    """
    from pytest_fxbucket.golden.mismatch import capped, change_lines

    folder.clear()
    diff = folder.file("golden.diff")
    folder.write("found.txt", text)
    if isinstance(given, str):
        lines = capped(list(unified_diff(_lines(expected), _lines(text), "expected", "found", lineterm="")), rest=diff)
    else:
        lines = change_lines(expected, text, ("expected", "found"), diff)
    return [f"to accept: {command}", *lines]


def _lines(text: str) -> list[str]:
    """Lines of ``text``; a last line without a line feed is marked as ``diff`` marks it."""
    lines = text.split("\n")
    return lines[:-1] if not lines[-1] else [*lines, "\\ no line feed at the end"]


class RequestingTest:
    """A test that uses ``fxbucket_golden`` or ``fxbucket_expect``: what it may write, and the plan in use."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self.item: pytest.Item = request.node
        self.fx = fx_session(request.config)
        self.options = self.fx.options

    def plan_run(self) -> PlanRun | None:
        """The run of the plan in use, if there is one."""
        used = "fxbucket_plan" in self._request.fixturenames
        found: PlanRun | None = self._request.getfixturevalue("fxbucket_run") if used else None
        return found

    def folder(self, name: str) -> Folder:
        """Folder for output about ``name`` that is too long to be shown."""
        return Folder(self.options.artifacts, self.item.nodeid.partition("::")[0], name, self.options.log_of)

    def arguments(self) -> list[str]:
        """Arguments of pytest that run the test: its node id, and the plan that the option gave it."""
        words = [self.item.nodeid]
        callspec = getattr(self.item, "callspec", None)
        ref = callspec.params.get("fxbucket_plan") if callspec is not None else None
        if isinstance(ref, PlanRef) and ref.path in self.options.plans:
            words.append(f"--fxbucket-plans={self.options.shown(ref.path)}")
        return words
