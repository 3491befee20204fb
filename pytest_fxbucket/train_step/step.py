"""A training step that is called like the function it was captured from, and runs as a graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from pytest_fxbucket.capture.override.overrides import Overrides, overrides_given
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.dtensors import is_dtensor, of_local
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.groups import members_of_groups
from pytest_fxbucket.step.iterations import Iterating
from pytest_fxbucket.step.roles import StepGraph
from pytest_fxbucket.train_step.agreement import Agreement
from pytest_fxbucket.train_step.guards import Arguments, Guard, Guards, has_groups, shared_memory, signature
from pytest_fxbucket.train_step.live import Live, LiveValues, StateMaking, refuse_shared_writes
from pytest_fxbucket.train_step.parallel import BatchDim, Parallel, ShardedSetup, part_model
from pytest_fxbucket.train_step.trace import TracedCall, trace_call
from pytest_fxbucket.train_step.transforming import Crossing, described, iterating_of, transformed
from pytest_fxbucket.transforms.registry import Transform
from pytest_fxbucket.transforms.transformation import traits_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def capture_step(
    function: Callable[..., Any],
    *,
    model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module],
    optimizers: Optimizer | Iterable[Optimizer] = (),
    parallel: Parallel | Sequence[Parallel] | None = None,
    mesh: DeviceMesh | None = None,
    batch_dim: BatchDim = 0,
    sync: bool = False,
    scaler: GradScaler | None = None,
    transforms: Sequence[Transform] = (),
    overrides: Mapping[str | type[nn.Module], Any] = {},
    may_be_idle: Sequence[str] = (),
    guards: Guard | Iterable[Guard] = (),
) -> CapturedStep:
    """Capture ``function``, a training step, as one that runs as a graph and is called alike.

    ``function(*args, **kwargs)`` is an eager step that uses ``model`` and ``optimizers``: forward, backward, clipping,
    ``step()``, ``zero_grad()``, in its own order, for one batch or several. Arguments and results are tensors, plain values,
    and tuples, lists and dicts of them; tensors that a call gives have no autograd graph.

    ``function`` itself runs only while it is traced, on fake tensors. A call traces it if nothing was traced yet that fits:
    what is compared are shapes, strides, dtypes and devices of arguments, parameters and buffers, process groups, structure
    and plain values of the arguments, plain values of the optimizers' parameter groups (learning rates are live), what
    FSDP2, DDP and a scaler are told (``set_requires_gradient_sync``, divisors, ``no_sync()``, growth), and what ``guards``
    lists: callables that give a value, and paths of attributes of ``model``. Not seen is all else that Python code may read
    or set: ``model.eval()``, another number in an attribute, closure or global, a hook or submodule that was replaced. List
    it in ``guards``, or call :meth:`CapturedStep.retrace` after such a change.

    Several modules are one model: of a mapping their names begin with its keys, of a sequence with their numbers. Modules that
    are parted already (FSDP2, DDP, tensor parallelism, DTensors) are taken as they are.

    ``parallel`` parts a model that is not, in place: "fully_shard", "hybrid_shard" or "replicate"; module paths with "colwise"
    or "rowwise" for tensor parallelism; ``callable(model, mesh)``; or several of them, one after the other. ``mesh`` is a
    ``DeviceMesh``, by default all ranks in one dimension; "hybrid_shard" takes one of two (copies, shards), a dimension "tp" is
    that of tensor parallelism. Parameters become what torch makes of them, in the optimizers too, with their state. Ranks must
    begin with the same values, or ``sync=True`` sends those of rank 0. Each call then takes the batch of all ranks: of each
    tensor among the arguments a rank computes with its part along ``batch_dim``, a number, or a mapping by argument (0 for
    others), None for what all ranks take whole.

    ``scaler`` is the ``torch.amp.GradScaler`` that the step uses: its scale is state of the graph, and where gradients are not
    finite parameters and state are what they were before.

    ``transforms`` each get the traced :class:`StepGraph` (graph "joint") and its state by name, and give a step that fits; they
    run once a trace. ``overrides`` has modules that are not traced, by FQN or class, each with "call" (the real module is
    called when the graph runs), a ``callable(module)`` that gives a sub-graph, asked here and once for each module, or an
    :class:`pytest_fxbucket.capture.Override`. ``may_be_idle`` names parameters of modules that are called, such as
    "layers.*.moe.experts.*", whose gradient is zero where a call has none; else such a call is an error.

    Raises :class:`CaptureError` for what is no model, optimizer, override or guard.
    """
    model = _one(model)
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for optimizer in given:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise CaptureError(f"optimizers has a value of type {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    if parallel is None and mesh is not None:
        raise CaptureError("mesh is given without parallel, which says what is done on it")
    parted = None if parallel is None else part_model(model, given, parallel, mesh, batch_dim, sync)
    return CapturedStep(
        function,
        model,
        given,
        tuple(transforms),
        overrides_given(model, overrides, may_be_idle),
        Guards(model, guards),
        parted,
        scaler,
    )


def _one(model: Any) -> nn.Module:
    """One module that has all the given ones as children, by key or number."""
    if isinstance(model, nn.Module):
        return model
    several = model if isinstance(model, Mapping) else dict(enumerate(model)) if isinstance(model, (list, tuple)) else {}
    if not several or not all(isinstance(module, nn.Module) for module in several.values()):
        odd = next((module for module in several.values() if not isinstance(module, nn.Module)), model)
        raise CaptureError(f"model is a value of type {type(odd).__name__}, expected a torch.nn.Module, or several")
    return nn.ModuleDict({str(name): module for name, module in several.items()})


@dataclass(frozen=True)
class _Program:
    """The result of one trace, ready to run."""

    traced: TracedCall
    step: StepGraph
    """The step after all transformations, which is what runs."""
    iterating: Iterating | None
    """The runner of a step whose work crosses iterations, else None."""
    groups: Mapping[str, tuple[int, ...]]
    """Ranks of each process group that the step launches on, by name."""

    def fits(self, live: Live) -> bool:
        """Whether process groups are as they were at the trace, and gradients there or not there where that matters."""
        return has_groups(self.groups) and all(
            (live.params[fqn].grad is not None) == there for fqn, there in self.traced.gradients.items()
        )


class CapturedStep:
    """A training step that is called like the function it was captured from; :func:`capture_step` makes it.

    A call writes new values into the model's own parameters and buffers and the optimizers' own state: both ``state_dict()``
    are right after each call, and may be loaded between two. Learning rates are read at each call. If a call fails, model and
    optimizers are as they were, unless a scheduler raised, or what ``last_step`` finishes: they come when the step has been
    taken, schedulers as in eager. What could not be finished is left to the next call.

    If a transform moves work into the next call, parameters, state and gradients of what moved are one call behind, and so is
    ``state_dict()``: a call with ``last_step=True`` finishes them, and the one after it begins anew. A call that runs another
    traced step finishes what the last one left first. Between calls nothing of what moved may be changed or loaded.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        transforms: Sequence[Transform],
        overrides: Overrides,
        guards: Guards,
        parted: ShardedSetup | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        self._function, self._model, self._optimizers, self._transforms = function, model, optimizers, transforms
        self._overrides, self._guards, self._parted, self._scaler = overrides, guards, parted, scaler
        self._crossing = Crossing() if any(traits_of(one).crosses_iterations for one in transforms) else None
        self._programs: dict[Hashable, list[_Program]] = {}
        self._traces = self._calls = 0
        self._agreement = Agreement(getattr(function, "__qualname__", type(function).__qualname__), model)
        self._removed: dict[str, torch.Tensor] = {}
        self.state: dict[str, torch.Tensor] = {fqn: first.clone() for fqn, first in overrides.first_state.items()}
        """State that transforms and overrides added, by name; shared by all traced steps. Save and load it with the model."""
        self._added: set[str] = set(self.state)

    @property
    def traces(self) -> int:
        """How often the function was traced."""
        return self._traces

    @property
    def graphs(self) -> tuple[StepGraph, ...]:
        """Every traced step that a call may run, transformed."""
        return tuple(program.step for programs in self._programs.values() for program in programs)

    def retrace(self) -> None:
        """Forget what was traced, so that the next call traces ``function`` again; for changes that no guard sees.

        State that transforms added stays, as does work that the last call left to the next one.
        """
        self._programs.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step. Raises :class:`CaptureError` for a step that cannot be traced, and for state that does not fit.

        ``last_step`` is the captured step's own keyword where a transform moves work into the next call, else ``function``'s.
        """
        self._calls += 1
        last_step = bool(kwargs.pop("last_step", False)) if self._crossing is not None else False
        if self._parted is not None:
            args, kwargs = self._parted.of_batch(self._function, args, kwargs)
        averaged = self._parted.averaged if self._parted is not None else None
        arguments, live = Arguments(args, kwargs), Live(self._model, self._optimizers, averaged, self._scaler)
        making = StateMaking(live, self._removed, self._added)

        specs: dict[str, Any] = {}  # filled when the program is known, before values are taken

        def take() -> LiveValues:
            return LiveValues(arguments.tensors(), live, self.state, specs)

        try:
            program = self._program(arguments, live, making)
            making.make(value for values in program.step.inputs.values() for value in values)
            specs.update(program.traced.specs)
            with _without_autocast():
                reply = self._run(program, take)
        except BaseException:  # Ctrl-C too; nothing else of the user's has changed, since results are written last
            making.undo()
            raise
        if last_step and self._crossing is not None:
            with _without_autocast():
                self._crossing.finish(take)
        for call in program.traced.schedulers:
            call()
        return reply

    def _run(self, program: _Program, take: Callable[[], LiveValues]) -> Any:
        traced = program.traced
        if self._crossing is not None:
            if program.iterating is not None:
                return _reply(traced, *self._crossing.step(program.iterating, take, traced.cleared))
            self._crossing.finish(take)  # what another traced step left
        values = take()
        inputs = values.gather(program.step.inputs["joint"])
        with torch.no_grad():
            results = program.step.graphs["joint"](*inputs)
        return _reply(traced, values, values.write(program.step.outputs["joint"], results, traced.cleared))

    def _program(self, arguments: Arguments, live: Live, making: StateMaking) -> _Program:
        """The program of this call; traced if none fits."""
        # Several programs may have one key: they differ in which parameters had gradients, and in process groups.
        guards = self._guards.now()
        key = signature(arguments, live, guards)
        found = next((program for program in self._programs.get(key, ()) if program.fits(live)), None)
        if found is None:
            found = self._trace(arguments, live, making, guards)
            self._programs.setdefault(key, []).append(found)
            self._traces += 1
        return found

    def _trace(self, arguments: Arguments, live: Live, making: StateMaking, guards: tuple[Hashable, ...]) -> _Program:
        traced = trace_call(self._function, arguments, live, self._removed, self._overrides)
        self._guards.refuse_changed(guards)
        live.refuse_told_otherwise()
        refuse_shared_writes(shared_memory(arguments, live), traced.outputs)
        step = described(traced, live)
        # Transformations get the tensors of all state, so state that the step's first update would make is made now.
        making.make(step.inputs["joint"])
        states = live.states() | self._removed | self.state
        result = transformed(step, states, self.state, self._transforms)
        iterating = iterating_of(result.step, traced, self._crossing)
        self._added.update(result.added)
        self.state.update(result.added)
        self._removed.update(result.removed)
        making.drop(result.removed)
        groups: dict[str, tuple[int, ...]] = {}
        for graph_module in result.step.graphs.values():
            groups |= members_of_groups(graph_module.graph)
        self._agreement.refuse_other(result.step, groups, self._calls)
        return _Program(traced, result.step, iterating, groups)


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Run a graph as it is: its casts are in it, and the caller's autocast would cast again what was exempt from it."""
    before = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    try:
        for kind in before:
            torch.set_autocast_enabled(kind, False)
        yield
    finally:
        for kind, enabled in before.items():
            torch.set_autocast_enabled(kind, enabled)


def _reply(traced: TracedCall, values: LiveValues, given: Mapping[str, Any]) -> Any:
    """The result that the function would have returned, put together from the graph's results by name."""
    leaves = []
    for leaf in traced.leaves:
        # An input is given back as the user's own object, which may be a DTensor already.
        value = given[leaf.value] if leaf.kind == "output" else values.own(leaf.value) if leaf.kind == "input" else leaf.value
        leaves.append(value if is_dtensor(value) else of_local(value, leaf.spec))
    return pytree.tree_unflatten(leaves, traced.spec)
