"""Runs in the ranks: torch's eager step and the bucketed graph, side by side on the same batches, compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_fxbucket.capture.batch import batch_of, microbatches, split_of
from pytest_fxbucket.capture.from_plan import import_model
from pytest_fxbucket.capture.parallel.context_parallel import cut_sequences
from pytest_fxbucket.capture.parallel.forwards import forwards_of
from pytest_fxbucket.capture.parallel.unshard import hooks_of
from pytest_fxbucket.checks.bitwise.job import BitwiseTask, TensorDifference, compare, final_run, graphs_of, what_of
from pytest_fxbucket.checks.bitwise.judge import difference_line
from pytest_fxbucket.checks.bitwise.localise import bits_digest, run_with_digests
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.c10d import group_called
from pytest_fxbucket.compat.fsdp import makes_gradients_to_reduce
from pytest_fxbucket.compat.modules import on_in_backward, uncompiled
from pytest_fxbucket.eager.context_parallel import WholeSequence
from pytest_fxbucket.eager.divergence import Divergence, first_divergence, own_rows
from pytest_fxbucket.eager.parting import parting_of_experts, parting_of_sequences
from pytest_fxbucket.eager.reasons import reasons_of
from pytest_fxbucket.eager.step_reports import StepReporter
from pytest_fxbucket.eager.trainer import EagerStep, Left, OtherModelError, TorchsOwn, Trainer
from pytest_fxbucket.eager.unit_calls import UnitCalls, unit_calls
from pytest_fxbucket.eager.wrapped import wrap
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.plan.schema_checks import Ring as Asked
from pytest_fxbucket.process.torch_settings import add_in_one_order
from pytest_fxbucket.ranks import device, mark
from pytest_fxbucket.ranks.process_groups import sums
from pytest_fxbucket.ranks.process_groups.sums import RingOrder
from pytest_fxbucket.step_runner import StepOutcome, factors, rates_after, rates_of, set_rates, state_and_batches

if TYPE_CHECKING:
    from torch import nn

    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.step_runner import StepRun


@dataclass(frozen=True, slots=True)
class EagerTask:
    """What one rank is to run."""

    plan: Plan
    graph: BitwiseTask
    localise_step: int | None = None
    """Step to follow module by module; None: compare results only."""
    removed: tuple[str, ...] = ()
    """Names of the state that transformations took out of the graph."""
    may_be_idle: frozenset[str] = frozenset()
    """Parameters that torch's own step may leave without a gradient where the graph has zeros."""
    unread: tuple[tuple[str, str], ...] = ()
    """Role and name of each value that no pipeline stage reads, so that no stage's graph has it: it must not change."""
    pipe: str = ""
    """Named pipe through which each step is reported; empty: no step is."""
    steady: bool = False
    """Whether learning rates stay as they are."""


@dataclass(slots=True)
class EagerOutcome:
    """What one rank saw."""

    digests: tuple[str, ...]
    """Digests of the graphs that ran: the bucketed one, or set-up, steady and clean-up."""
    differences: list[TensorDifference] = field(default_factory=list)
    one_sided: list[str] = field(default_factory=list)
    """A clause for each gradient that only the graph has."""
    lacking: list[str] = field(default_factory=list)
    """A clause for each value that only torch's own step has. Under pipeline stages another rank's graph may have it."""
    compared: int = 0
    """How many tensors were compared, in all steps."""
    unasked: str = ""
    """Why it is not known whether the model gives of parts what it gives of wholes; empty if it is known."""
    cannot: str = ""
    """What torch raised where it cannot step the model."""
    wrong: str = ""
    """What is wrong with a trainer of the user's own, a clause."""
    reasons: tuple[str, ...] = ()
    """Those reasons for other bits by design that hold for the model."""
    hooked: str = ""
    """A parameter with a hook of ``register_hook``, which FSDP2 puts aside with the parameter; empty if there is none."""
    units: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameters that torch reduces together, as its wrapper says; empty for a trainer of the user's own."""
    divergence: Divergence | None = None


class _RaisedError(FxbucketError):
    """The eager step raised."""


def run(rank: int, world: int, task: EagerTask) -> EagerOutcome:
    """Run the plan's steps both ways from the same state, and compare after each until they differ.

    Learning rates follow their schedules, or shrink as in bitwise, so that the rate of a wrong step or group shows.
    """
    graph, asked = task.graph, task.plan.run
    add_in_one_order()
    if asked.reduce == "ring":
        ring = asked.ring or Asked()
        sums.add_by(RingOrder(ring.channels, ring.chunk_bytes, world // ring.nodes))
    graphs, digests, numbers = graphs_of(rank, graph, {})
    found = EagerOutcome(digests)
    start, batches = state_and_batches(rank, graph)
    ours = final_run(graphs, start, graph, numbers)
    reporter = StepReporter(task.pipe, rank)
    try:
        theirs = _Reference.make(rank, task, found, {value.key for value in ours.task.inputs})
        unread = {key: one for key, one in theirs.step.tensors().items() if key in task.unread}
        if task.plan.eager.factory and not task.steady:
            theirs.step.refuse_other_rates(rates_of(ours), rates_after(ours.task, 0))
        for step in range(graph.steps):
            batch = [tensor.to(device()) for tensor in batches(step)]
            if not task.steady:
                set_rates([ours], step)
                theirs.step.set_rates(rates_after(ours.task, step), factors(ours.task))
            if step == task.localise_step:
                found.divergence = _followed(ours, theirs, batch, step, graph)
                return found
            took, left = _graph_step(ours, batch, step, graph), theirs.take(batch, step)
            made = unread | _by_key(ours, took)
            # Later steps differ since an earlier one did: only their losses are reported then.
            if not found.differences:
                _compare(found, rank, step, made, left, task)
            reporter.report(step, made.get(("loss", ""), left["loss", ""]), left["loss", ""], _first(found))
    except _RaisedError as error:
        # A model that torch cannot step is a skip. A trainer of the user's own that cannot is wrong.
        found.cannot, found.wrong = ("", f"it raised {error}") if task.plan.eager.factory else (str(error), "")
    except OtherModelError as error:
        found.wrong = str(error)
    finally:
        reporter.close()
    return found


def _first(found: EagerOutcome) -> str:
    return difference_line(found.differences[0], {}) if found.differences else ""


def _graph_step(ours: StepRun, batch: Sequence[Tensor], step: int, graph: BitwiseTask) -> StepOutcome:
    torch.manual_seed(graph.seed + step)
    return ours.step([tensor.clone() for tensor in batch], step + 1, graph.steps)


def _followed(ours: StepRun, theirs: _Reference, batch: Sequence[Tensor], step: int, graph: BitwiseTask) -> Divergence:
    ours.watch = run_with_digests
    took = _graph_step(ours, batch, step, graph)
    known = {digest for _, _, digests in ours.seen for digest in digests.values()}
    # The model may give on what it was given, as ``x.detach()`` does: inputs are no results, but are known, too.
    known |= {bits_digest([value]) for value in (*batch, *took.inputs_after)}
    return first_divergence(theirs.step.trainer.model, known, lambda: theirs.take(batch, step))


@dataclass(frozen=True)
class _Reference:
    """The eager step on this rank."""

    step: EagerStep
    task: BitwiseTask
    leaves: Sequence[Any]
    """Leaves of a batch; in each step its tensors take the places of the tensors."""
    spec: Any
    attention: Callable[[], AbstractContextManager[Any]]
    """Gives the context in which each step is taken."""

    @classmethod
    def make(cls, rank: int, task: EagerTask, found: EagerOutcome, held: Collection[tuple[str, str]]) -> _Reference:
        """Build it, and note in ``found`` the reasons for which it may round otherwise.

        A trainer must have all parameters and buffers of the plan's model; under pipeline stages those in ``held``.
        """
        plan, graph = task.plan, task.graph
        assert plan.model is not None
        _, batch, _ = import_model(plan.model, graph.where)
        whole = batch_of(batch(graph.mesh.data_rank(rank), 0))
        data = pytree.tree_map(lambda one: one.to(device()) if isinstance(one, Tensor) else one, whole)
        with _its_own():
            trainer = _own_trainer(task) if plan.eager.factory else _torchs(task, data, found)
            step = EagerStep(trainer, updates=bool(plan.optimizer))
            if plan.eager.factory:
                step.begin({key: one for key, one in _whole(_built(task)).items() if plan.pipeline is None or key in held})
        if (plan.parallel.cp > 1 or plan.parallel.ep > 1) and not plan.eager.factory:
            found.unasked = _refuse_parting(task, rank, data)
        attention: Callable[[], AbstractContextManager[Any]] = nullcontext
        if plan.parallel.cp > 1 and not plan.eager.factory:
            group = group_called(graph.mesh.group("cp").name)
            attention = partial(on_in_backward, WholeSequence(group, plan.parallel.cp_form))
        return cls(step, graph, *pytree.tree_flatten(data), attention)

    def take(self, batch: Sequence[Tensor], step: int) -> Left:
        """Take a step on copies of ``batch``, the tensors of a batch."""
        mark(f"eager step {step + 1} of {self.task.steps}")
        tensors = iter(batch)
        leaves = [next(tensors).clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        # As the graph's step is seeded, so that both draw the same numbers.
        torch.manual_seed(self.task.seed + step)
        with _its_own(), uncompiled(), self.attention():  # uncompiled, as in capture
            return self.step.take(pytree.tree_unflatten(leaves, self.spec))


def _own_trainer(task: EagerTask) -> Trainer:
    """The trainer of ``[eager] factory``."""
    plan = task.plan
    factory = import_callable(plan.eager.factory or "", f"{plan.path}: [eager] factory")
    torch.manual_seed(task.graph.seed)
    trainer: Trainer = factory({dim.name: dim.size for dim in task.graph.mesh.dims}, **plan.eager.args)
    if missing := [name for name in ("model", "optimizers", "backward", "update") if not hasattr(trainer, name)]:
        raise OtherModelError(f"[eager] factory gave a {type(trainer).__name__} without {', '.join(missing)}")
    return trainer


def _built(task: EagerTask) -> nn.Module:
    """The plan's model, whole, as every rank builds it."""
    assert task.plan.model is not None
    factory, _, _ = import_model(task.plan.model, task.graph.where)
    torch.manual_seed(task.graph.seed)
    model: nn.Module = factory(**task.plan.model.args)
    return model.to(device())


def _refuse_parting(task: EagerTask, rank: int, data: Any) -> str:
    """Raise :class:`OtherModelError` for a model that does not give of parts what it gives of wholes, along cp or ep.

    Returns why that is not known; empty if it is known.
    """
    plan, mesh = task.plan, task.graph.mesh
    assert plan.model is not None
    # Without dropout, and in float32, values of a part differ from those of the whole by rounding alone.
    model = _built(task).float().eval()
    split = split_of(model, data, plan.model.inputs)
    with uncompiled():
        if plan.parallel.cp > 1:
            part, group = cut_sequences(data, mesh, rank), group_called(mesh.group("cp").name)
            own = parting_of_sequences(lambda batch: split.call(model, batch), data, part, group)
        else:
            experts = {fqn: model.get_submodule(fqn) for fqn in forwards_of(model, plan).experts}
            own = parting_of_experts(lambda: split.call(model, data), experts, plan.parallel.ep)
    said = [own] * dist.get_world_size()
    dist.all_gather_object(said, own)  # a rank that went on alone would wait for ever
    if wrong := next((one.wrong for one in said if one.wrong), ""):
        raise OtherModelError(wrong)
    return next((one.unasked for one in said if one.unasked), "")


def _whole(model: nn.Module) -> Left:
    found: Left = {("param", fqn): one.detach() for fqn, one in model.named_parameters()}
    return found | {("buffer", fqn): one for fqn, one in model.named_buffers()}


def _torchs(task: EagerTask, data: Any, found: EagerOutcome) -> Trainer:
    """The plan's own model under torch's parallelism."""
    plan, graph = task.plan, task.graph
    assert plan.model is not None
    _, _, loss = import_model(plan.model, graph.where)
    model = _built(task)
    split = split_of(model, data, plan.model.inputs)
    calls = UnitCalls()
    # Another model is built and run for that: only where the answer is asked for.
    if {"reused_unit", "shared_input"}.intersection(plan.eager.rounds_otherwise) or task.localise_step is not None:
        leaves, spec = pytree.tree_flatten(data)
        part = pytree.tree_unflatten(next(microbatches(leaves, plan.step.microbatches)), spec)
        calls = unit_calls(_built(task), plan, lambda one: split.loss(loss, split.call(one, part), part))
    found.reasons = reasons_of(model, plan, calls, makes_gradients_to_reduce())
    found.hooked = next(iter(hooks_of(model)), "") if plan.parallel.mode != "replicate" else ""
    gradients = {value.fqn for value in graph.outputs if value.role == "grad"}
    wrapped = wrap(
        model,
        plan,
        graph.mesh,
        reused=calls.reused if "reused_unit" in plan.eager.rounds_otherwise else (),
        without_gradient=any(one.trainable and one.fqn not in gradients for one in graph.parameters),
    )
    found.units = wrapped.units
    # Asked behind wrapping, since FSDP2 puts parameters of its own into the model, which optimizers must update.
    named = dict(wrapped.model.named_parameters())
    return TorchsOwn(wrapped, split, loss, plan.step, graph.optimizing.build(named) if graph.optimizing is not None else [])


@contextmanager
def _its_own() -> Iterator[None]:
    try:
        yield
    except OtherModelError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise _RaisedError(f"{type(error).__name__}: {said}" if said else type(error).__name__) from error


def _by_key(ours: StepRun, took: StepOutcome) -> Left:
    """What the graph left, by role and name: inputs as they are now, then outputs."""
    left = {v.key: tensor for v, tensor in zip(ours.task.inputs, took.inputs_after, strict=True)}
    left |= {v.key: made for v, made in zip(ours.task.outputs, took.results, strict=True)}
    # The graph may name the loss; the eager step does not.
    return {("loss", "") if key[0] == "loss" else key: value for key, value in left.items()}


def _compare(found: EagerOutcome, rank: int, step: int, ours: Left, theirs: Left, task: EagerTask) -> None:
    """Compare losses, gradients, parameters, buffers and state; note what the graph lacks, and gradients that it alone has."""
    graph, removed = task.graph, task.removed
    for key, value in theirs.items():
        role, fqn = key
        what = what_of(role, role)
        if key in ours:
            found.compared += 1
            mine = own_rows(ours[key], fqn, rank, graph)
            found.differences += compare(step, rank, what, fqn, value, mine)
        elif fqn not in removed:
            found.lacking.append(f"the graph has no {what} {fqn}")
    for (role, fqn), value in ours.items():
        # Where eager leaves .grad as it is, the graph of a called module has zeros. That is right for parameters that may be
        # idle.
        is_idle = fqn in task.may_be_idle and not bool(value.any())
        if role == "grad" and (role, fqn) not in theirs and not is_idle:
            found.one_sided.append(f"torch's own step has no gradient {fqn}")
