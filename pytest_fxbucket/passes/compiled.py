"""The pass under ``torch.compile``: as a backend of its own, and as inductor's post-grad pass.

AOT autograd parts a step into a forward and a backward graph, and every graph break gives two more. Each graph is bucketed by
itself, since collectives of different graphs cannot share a launch.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack
from weakref import WeakKeyDictionary

import torch

from pytest_fxbucket.compat import compilers
from pytest_fxbucket.compat.compilers import CustomGraphPass
from pytest_fxbucket.compat.tracing import at_end_of_backward, in_backward, trace
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph.ops import overload
from pytest_fxbucket.passes.module_names import ModuleStackFn
from pytest_fxbucket.passes.several_graphs import SeveralGraphs
from pytest_fxbucket.plan.load import read_plan
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_bucket import Bucket
from pytest_fxbucket.words import nearest, show

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.report import PassReport

Entries = Sequence[str | Sequence[str]]
InnerCompiler = Callable[["fx.GraphModule", Sequence[Any]], Callable[..., Any]]


def bucketing_backend(
    module_bucket_plans: Entries = (),
    *,
    compiler: Literal["eager", "inductor"] | InnerCompiler = "eager",
    module_stack_fn: ModuleStackFn | None = None,
    **options: Unpack[BucketingOptions],
) -> BucketingBackend:
    """A backend that buckets by module: ``torch.compile(model, backend=bucketing_backend(["layers.0", ["norm", "output"]]))``.

    ``module_bucket_plans`` and ``module_stack_fn`` are those of the drop-in; none with ``by="size", cap_mb=25``. ``options``
    are the keys of a plan file's ``[bucket]`` and ``[overlap]``, with their defaults but for ``unplanned="allow"``. The
    bucketed graphs are run as they are (``compiler="eager"``), or given to ``compiler(graph module, example inputs)``, forward
    and backward apart. With ``compiler="inductor"`` the pass is inductor's post-grad pass, and ``insert_overlap_deps`` is on
    unless said otherwise, since inductor puts launches and waits in an order of its own.

    Raises :class:`PlanError` for options that cannot be had. One backend serves one model.
    """
    if not callable(compiler) and compiler not in ("eager", "inductor"):
        raise PlanError(f'bucketing_backend: compiler must be "eager", "inductor" or a callable, not {show(compiler)}')
    where = "bucketing_backend"
    kept: dict[str, Any] = {"insert_overlap_deps": True, **options} if compiler == "inductor" else {**options}
    return BucketingBackend(SeveralGraphs(plan_of(module_bucket_plans, kept, where), module_stack_fn, where), compiler)


def bucketing_post_grad_pass(
    module_bucket_plans: Entries = (), *, module_stack_fn: ModuleStackFn | None = None, **options: Unpack[BucketingOptions]
) -> BucketingPostGradPass:
    """A pass for ``torch._inductor.config.post_grad_custom_post_pass``, which is for every graph that inductor compiles then.

    Arguments, defaults and errors are those of :func:`bucketing_backend` with inductor. ``torch.compile(model, options=
    bucketing_post_grad_pass(...).options)`` compiles this model alone with it. Inductor's cache keeps graphs of
    different plans and module names apart; it keeps none where ``module_stack_fn`` or a packer of your own has a say.
    """
    where = "bucketing_post_grad_pass"
    plan = plan_of(module_bucket_plans, {"insert_overlap_deps": True, **options}, where)
    return BucketingPostGradPass(SeveralGraphs(plan, module_stack_fn, where))


class BucketingBackend:
    """What :func:`bucketing_backend` gives."""

    def __init__(self, graphs: SeveralGraphs, compiler: str | InnerCompiler) -> None:
        self._graphs, self._compiler = graphs, compiler
        self._is_checked = False

    @property
    def reports(self) -> tuple[PassReport, ...]:
        """What was done to each compiled graph that launches collectives, in order of compilation."""
        return self._graphs.reports

    def check(self) -> None:
        """Raise :class:`PlanError` for an entry that no graph so far has matched; the first backward ends with it."""
        self._graphs.check()

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile dynamo's ``gm``."""
        return self._checking(self._compile(gm, inputs))

    def _compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        of = compilers.compile_id()
        if self._compiler == "inductor":
            # Inductor may have the graph in its cache, and then never calls the pass: its modules are noted here.
            self._graphs.look_at(gm.graph, of)
            apart = BucketingPostGradPass(self._graphs, is_checked_elsewhere=True)
            return compilers.inductor(gm, inputs, apart, apart.options)

        def bucketed(apart: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
            self._graphs.apply(apart.graph, of)
            apart.recompile()
            return compilers.boxed(self._compiler(apart, given) if callable(self._compiler) else compilers.eager(apart, given))

        return compilers.aot(gm, inputs, bucketed)

    def _checking(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled``, whose first backward ends with a check: by then all graphs of the step are compiled."""

        def run(*args: Any) -> Any:
            results = compiled(*args)
            # Autograd takes a callback for the end of a backward only while one runs, so it is queued from its first hook.
            if not self._is_checked:
                _before_backward(results, lambda: at_end_of_backward(self._check_once))
            return results

        return run

    def _check_once(self) -> None:
        if not self._is_checked:
            self.check()
            self._is_checked = True


class BucketingPostGradPass(CustomGraphPass):
    """What :func:`bucketing_post_grad_pass` gives."""

    def __init__(self, graphs: SeveralGraphs, *, is_checked_elsewhere: bool = False) -> None:
        self._graphs, self._is_checked_elsewhere = graphs, is_checked_elsewhere
        self._has_warned = self._has_warned_of_order = False
        self._keys: WeakKeyDictionary[object, str | None] = WeakKeyDictionary()

    @property
    def reports(self) -> tuple[PassReport, ...]:
        """As of the backend; graphs that inductor had in its cache never came to the pass, and have none."""
        return self._graphs.reports

    @property
    def options(self) -> dict[str, Any]:
        """For ``torch.compile(options=...)``: the pass, and what keeps inductor from moving launches and waits once more."""
        return {**(compilers.moving_nothing() if self._graphs.keeps_order else {}), "post_grad_custom_post_pass": self}

    def check(self) -> None:
        """Raise :class:`PlanError` for an entry that no graph so far has matched.

        The pass calls it itself at the end of the first backward, if the backward graph is compiled only when it runs. With
        ``fullgraph=True`` it calls it when it gets the backward graph. Otherwise it cannot know which graphs are to come: it
        warns, and you should call this after the first step, as also if all graphs come from inductor's cache.
        """
        self._graphs.check()

    def __call__(self, graph: fx.Graph) -> None:
        """Bucket ``graph`` in place."""
        self._warn_of_order()
        # Inductor has broken down operators before its post-grad passes, so the pass's own nodes are broken down here.
        before = set(graph.nodes)
        is_of_backward = self._graphs.apply(graph, compilers.compile_id())
        decompose(graph, [node for node in graph.nodes if node not in before], compilers.inductor_decompositions())
        if self._is_checked_elsewhere or not is_of_backward or not self._graphs.missing():
            return
        if in_backward():
            at_end_of_backward(self.check)
        elif compilers.is_whole():
            self.check()
        elif not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{self._graphs.missing()}; so far: call check() after the first step", stacklevel=1)

    def _warn_of_order(self) -> None:
        if self._has_warned_of_order or not self._graphs.keeps_order:
            return
        if moving := compilers.moving_launches():
            self._has_warned_of_order = True
            warnings.warn(
                "bucketing_post_grad_pass: inductor moves launches and waits once more behind the pass; to keep their order, "
                "give torch.compile the pass's own options, or set "
                + " and ".join(f"torch._inductor.config.{name} = False" for name in moving),
                stacklevel=1,
            )

    def uuid(self) -> str | None:
        """Key of the plan, its options, this package's code and the modules in the graph; None: inductor is not to cache it."""
        graph, compilation = compilers.graph_of_dynamo(), compilers.compilation()
        if compilation is None:
            return None
        if graph is not None:
            self._graphs.look_at(graph, compilers.compile_id())
            self._keys[compilation] = self._graphs.key(graph)
        # A backward that is compiled later has no graph of dynamo's: it has the key of its forward.
        return self._keys.get(compilation)


def _before_backward(results: object, do: Callable[[], None]) -> None:
    """Call ``do()`` when a ``backward()`` comes to any of ``results``."""
    for result in results if isinstance(results, (list, tuple)) else [results]:
        function = getattr(result, "grad_fn", None)
        if function is not None:
            function.register_prehook(lambda _: do())


# The pass's options as keyword arguments: the keys of a plan file's ``[bucket]`` and ``[overlap]``, read by the same rules.


class BucketingOptions(TypedDict, total=False):
    """Each as the key of its name in a plan file, with the same default; but ``unplanned`` is "allow"."""

    by: Literal["plan", "size", "overlap"]
    layout: Literal["registration", "execution"]
    dtypes: Literal["separate", "mixed"]
    cap_mb: float | Sequence[float]
    packer: str
    unplanned: Literal["error", "allow", "root"]
    prefetch: int
    defer_reduce: bool
    insert_overlap_deps: bool
    gather_group: Literal["same", "own", "backward"]
    launch_at: Mapping[str, Mapping[str, str]]
    wait_before: Mapping[str, Mapping[str, str]]
    schedule: Literal["manual", "auto"]
    max_memory_increase: float
    max_memory_increase_gb: float
    max_in_flight_gb: float
    max_prefetch: int
    cluster: str | Mapping[str, Any]
    """A preset, or the table ``[cluster]``, of which ``cost`` is not asked: for ``schedule="auto"``."""


def plan_of(entries: object, options: Mapping[str, Any], where: str) -> Plan:
    """``entries`` and ``options`` as a plan file would hold them; only its ``bucket`` and ``overlap`` mean anything.

    Raises :class:`PlanError`, beginning with ``where``, for unknown options, values that they do not take, and options that
    contradict each other.
    """
    tables: dict[str, Any] = {"bucket": {}, "overlap": {}}
    taken = set(BucketingOptions.__annotations__)
    for name, value in options.items():
        if name not in taken:
            near = nearest(name, sorted(taken)) or f"; known are {', '.join(sorted(taken))}"
            raise PlanError(f'{where} takes no option "{name}"{near}')
        if name == "cluster":
            tables["cluster"] = {"preset": value} if isinstance(value, str) else value
            continue
        table = "bucket" if name in {field.name for field in dataclasses.fields(Bucket)} else "overlap"
        tables[table][name] = list(value) if isinstance(value, tuple) else value
    if entries is not None and entries != () and entries != []:
        tables["bucket"]["plan"] = entries
    # By size, and by overlap without entries, nothing is left out, and ``unplanned`` may not be said.
    if tables["bucket"].get("by") != "size" and (entries or tables["bucket"].get("by") != "overlap"):
        tables["bucket"].setdefault("unplanned", "allow")
    # A plan file must have a model and a mesh; nobody reads these.
    raw = {"graph": {"factory": "compiled:graph"}, "parallel": {"dp_shard": 2}, **tables}
    plan = read_plan(raw, Path(where), None, where)
    if plan.cluster is not None and plan.cluster.cost is not None:
        raise PlanError(f"{where}: cluster has a cost of its own, which is not asked here; give figures alone")
    if len(plan.bucket.cap_mb) > 1 and any("*" in selector for entry in plan.bucket.plan for selector in entry.selectors):
        raise PlanError(f"{where}: a cap for each entry cannot be told where an entry is a star; write the entries out")
    return plan


# Breaks operators down to those that a compiler has code for: behind its own decompositions, nobody else does.


def decompose(graph: fx.Graph, nodes: Iterable[fx.Node], table: Mapping[Any, Any]) -> None:
    """Replace each of ``nodes`` whose operator is in ``table``, or is made of others for every device, by what it is made of.

    ``table`` maps operators to functions, as ``torch._decomp`` has them.
    """
    for node in nodes:
        op = overload(node)
        if op is not None and (op in table or op._can_decompose()):
            _replace(graph, node, trace(_call_of(node), [n.meta["val"] for n in node.all_input_nodes], table))


def _call_of(node: fx.Node) -> Any:
    """What ``node`` computes, as a function of its inputs in order."""

    def call(*values: Any) -> Any:
        value_of = dict(zip(node.all_input_nodes, values, strict=True))
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of.__getitem__)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    return call


def _replace(graph: fx.Graph, node: fx.Node, parts: fx.GraphModule) -> None:
    made = dict(zip(parts.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    with graph.inserting_before(node):
        for part in parts.graph.nodes:
            if part.op == "call_function":
                made[part] = graph.node_copy(part, made.__getitem__)
                made[part].meta = {**node.meta, "val": part.meta["val"]}
    result: Any = torch.fx.node.map_arg(parts.graph.output_node().args[0], made.__getitem__)
    if isinstance(result, torch.fx.Node):
        node.replace_all_uses_with(result)
    # Of an operator that gives several values, each getitem becomes the value itself.
    for user in list(node.users):
        assert user.target is getitem, user
        user.replace_all_uses_with(result[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
