"""Runs in the ranks: the unbucketed and the bucketed step, side by side on the same batches, compared bit for bit."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pytest_fxbucket.checks.bitwise.compiled import CompiledGraph
from pytest_fxbucket.checks.bitwise.localise import (
    Batch,
    FirstDifference,
    bits,
    bits_digest,
    first_difference,
    ulps_apart,
    what_crossed,
)
from pytest_fxbucket.checks.devices import place
from pytest_fxbucket.graph.groups import ensure_twins
from pytest_fxbucket.pipeline.running import PipelinedRun, PipelinedTask
from pytest_fxbucket.process import collector
from pytest_fxbucket.process.torch_settings import add_in_one_order
from pytest_fxbucket.ranks import device
from pytest_fxbucket.ranks.process_groups.nccl import record
from pytest_fxbucket.step.decoded import DecodedGraphs
from pytest_fxbucket.step.mesh import make_groups
from pytest_fxbucket.step.portable import PortableGraph, digest, encode_module
from pytest_fxbucket.step_runner import (
    KEPT,
    OneGraph,
    PhaseGraph,
    StepOutcome,
    StepRun,
    StepTask,
    ThreeGraphs,
    begun_with,
    placed,
    set_rates,
    state_and_batches,
)

if TYPE_CHECKING:
    from pytest_fxbucket.pipeline.rank_stage import Crossed
    from pytest_fxbucket.step.roles import Key, Value


_DECODED = DecodedGraphs()


@dataclass(frozen=True, slots=True, kw_only=True)
class BitwiseTask(StepTask):
    """What one rank is to run."""

    unbucketed: PortableGraph
    bucketed: PortableGraph | None
    """None for a step of several graphs."""
    steps: int
    crossing: tuple[PhaseGraph, ...] = ()
    """For a step whose work crosses iterations, its set-up, steady and clean-up graphs."""
    pipelined: PipelinedTask | None = None
    """For a step in pipeline stages, the stages of this rank."""
    final_inputs: tuple[Value, ...] = ()
    """Inputs of the final step, without carried values; empty if they are those of the reference."""
    final_outputs: tuple[Value, ...] = ()
    """Its outputs, likewise; used only if ``final_inputs`` are not empty."""
    backend: str = "gloo"
    """The back end of the ranks, which says which settings are recorded."""
    compiler: str = "none"
    """Compiles both graphs of a step that is one graph: none, aot_eager, inductor."""
    localise_step: int | None = None
    """Step to compare node by node; None: compare results only."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that differs on one rank after one step."""

    step: int
    rank: int
    what: str
    """loss, gradient, parameter, buffer, output."""
    fqn: str
    elements: int
    """Number of elements that differ."""
    numel: int
    ulps: int
    """Largest distance in units in the last place; -1 where it has no meaning (NaN against number, integers)."""


@dataclass(slots=True)
class BitwiseOutcome:
    """What one rank saw."""

    digests: tuple[str, ...]
    """Digests of the graphs that ran: unbucketed, then bucketed, or the graphs of several phases in their order."""
    differences: list[TensorDifference] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    """Digest of the batch of each step."""
    built: dict[str, str] = field(default_factory=dict)
    """Digest of each whole parameter and buffer as the model's factory made it."""
    parameter_digests: dict[str, str] = field(default_factory=dict)
    """Digest of this rank's part of each parameter, with its gradient and state, after the last step of the unbucketed run."""
    still: list[str] = field(default_factory=list)
    """FQNs of parameters that the optimizer left as they were."""
    losses: list[str] = field(default_factory=list)
    """Digest of the unbucketed loss of each step."""
    squares: list[dict[str, float]] = field(default_factory=list)
    """For each step, the squared norm of this rank's part of each gradient."""
    zero: list[str] = field(default_factory=list)
    """FQNs of gradients that were all zero in every step that was not on edge values."""
    not_finite: list[str] = field(default_factory=list)
    """Gradients, by FQN, and the loss that had a NaN or an infinity in a step that was not on edge values."""
    first: FirstDifference = field(default_factory=FirstDifference)
    sent_digests: dict[Crossed, str] = field(default_factory=dict)
    """In the step to localise, the digest of each value that a pipeline stage of this rank made for a neighbouring stage."""
    received: dict[Crossed, str] = field(default_factory=dict)
    """The same for each value that a stage of this rank received."""
    emitted: tuple[str, ...] = ()
    """Launches and waits in the order of the code that a compiler wrote for the bucketed graph."""
    peak_bytes: int = 0
    """Largest resident size of the rank's process so far; on a GPU, the most GPU memory that the rank's tensors took."""
    ran_on: tuple[str, ...] = ()
    """Settings that sums on GPUs depend on, ``name=value`` each."""


def run(rank: int, world: int, task: BitwiseTask) -> BitwiseOutcome:
    """Run ``task.steps`` steps of both graphs from the same state, the last on edge values, and compare after each.

    Work that crosses iterations is finished after each step on copies of the state, as if that step was the last. Learning
    rates without a schedule shrink from step to step, each by a factor of its own: an update that used the rate of another step
    or group would show.
    """
    add_in_one_order()
    graphs, digests, numbers = graphs_of(rank, task, {"unbucketed": task.unbucketed})
    outcome = BitwiseOutcome(digests)
    outcome.ran_on = record(task.backend)
    start, batches = state_and_batches(
        rank, task, on_built=lambda whole: outcome.built.update({fqn: bits_digest([one]) for fqn, one in whole.items()})
    )
    runs = [
        one_graph(graphs["unbucketed"], placed(start, task.inputs, numbers), task, "unbucketed"),
        final_run(graphs, start, task, numbers),
    ]
    # Parameters and gradients that hold nothing can only be "as they were" and "all zero".
    empty = {parameter.fqn for parameter in task.parameters if 0 in parameter.shape}
    zero = {value.fqn for value in task.outputs if value.role == "grad"} - empty
    before: dict[Key, torch.Tensor] = {}
    for step in range(task.steps):
        # Copies: edge values must not reach tensors that the user's factory gives again.
        batch = [tensor.to(device(), copy=True) for tensor in batches(step)]
        outcome.batches.append(bits_digest(batch))
        set_rates(runs, step)
        # Not where work crosses iterations: a moved update is still to come then and would change the edge values, where the
        # unbucketed run has updated before it gets them.
        edges = not task.crossing and is_on_edges(step, task.steps)
        if edges:
            put_edges(batch)
            for one in runs:
                put_edges(one.state, [value for value in one.task.inputs if value.role in KEPT])
        if step == task.localise_step:
            following = [tensor.to(device()) for tensor in batches(step + 1)] if step + 1 < task.steps else None
            _localise(outcome, runs, (batch, following), task, step)
            return outcome
        # Each run gets the same random numbers and a batch of its own, since a graph may write its inputs.
        took = []
        for one in runs:
            torch.manual_seed(task.seed + step)
            took.append(one.step([tensor.clone() for tensor in batch], step + 1, task.steps))
        outcome.differences += _compare_late(step, rank, before, took[1].late)
        if edges:  # edge values may give NaNs on the way
            _one_nan([tensor for each in took for tensor in (*each.results, *each.inputs_after)])
        outcome.differences += _compare_step(step, rank, [(one.task, each) for one, each in zip(runs, took, strict=True)])
        results = took[0].results
        before = {value.key: result for value, result in zip(task.outputs, results, strict=True)}
        losses = [result for value, result in zip(task.outputs, results, strict=True) if value.role == "loss"]
        outcome.losses.append(bits_digest(losses))
        if not edges:
            zero -= _note(outcome, task, results)
            outcome.still = [fqn for fqn in _still(task, start, runs[0].state) if fqn not in empty]
    outcome.zero = sorted(zero)
    outcome.parameter_digests = _parameter_digests(task, runs[0].state, results)
    outcome.emitted = runs[1].emitted if isinstance(runs[1], CompiledGraph) else ()
    outcome.peak_bytes = _peak_bytes()
    return outcome


def _localise(
    outcome: BitwiseOutcome, runs: Sequence[StepRun], batches: Sequence[Batch | None], task: BitwiseTask, step: int
) -> None:
    if isinstance(runs[1], PipelinedRun):
        assert batches[0] is not None
        outcome.sent_digests, outcome.received = what_crossed(runs[1], batches[0], step, task)
    else:
        outcome.first = first_difference(runs, batches, task, step, task.steps)


def _one_nan(tensors: Sequence[Any]) -> None:
    """Make all NaNs the same: which of two NaNs an addition gives depends on the lane of a vector, not on the program."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.detach().masked_fill_(tensor.isnan(), float("nan"))


def graphs_of(
    rank: int, task: BitwiseTask, others: Mapping[str, PortableGraph]
) -> tuple[dict[str, fx.GraphModule], tuple[str, ...], frozenset[Key]]:
    """The graphs that ``rank`` runs, ``others`` first, on their device and with their process groups.

    Gives a digest of each, too, and the keys of inputs that the graphs read as numbers, which stay on the CPU.
    """
    phases = task.pipelined.graphs if task.pipelined else task.crossing
    sent = {**others, **({"bucketed": task.bucketed} if task.bucketed is not None else {})}
    sent |= {one.phase: one.graph for one in phases}
    inputs = {"unbucketed": task.inputs, "bucketed": _final(task).inputs, **{one.phase: one.inputs for one in phases}}
    with collector.paused():
        # On a device graphs are changed below, and a compiler changes those that it is given.
        graphs = _DECODED.take(sent, keep=device() == "cpu" and task.compiler == "none")
        # Taken here, before anything is moved to a device: it is compared with the digest of the graph that was checked.
        digests = tuple(digest(encode_module(graph)) for graph in graphs.values())
    make_groups(task.mesh, rank)
    for graph in graphs.values():
        ensure_twins(graph.graph)
    return graphs, digests, place([(graph, inputs[name]) for name, graph in graphs.items()], device())


def final_run(
    graphs: Mapping[str, fx.GraphModule], start: Sequence[torch.Tensor], task: BitwiseTask, numbers: frozenset[Key]
) -> StepRun:
    """The step that is checked, on copies of ``start``; ``numbers`` are the keys that :func:`graphs_of` gives."""
    final = _final(task)
    state = placed(begun_with(start, task, final.inputs, task.first_state), final.inputs, numbers)
    if "bucketed" in graphs:
        return one_graph(graphs["bucketed"], state, final, "bucketed")
    if task.pipelined is not None:
        return PipelinedRun(graphs, task.pipelined, state, final)
    return ThreeGraphs({one.phase: graphs[one.phase] for one in task.crossing}, task.crossing, state, final)


def one_graph(graph: fx.GraphModule, state: list[torch.Tensor], task: BitwiseTask, name: str) -> OneGraph:
    """A step as one graph, compiled if the task says so."""
    if task.compiler == "none":
        return OneGraph(graph, state, task, name)
    return CompiledGraph(graph, state, task, name, task.compiler)


def _final(task: BitwiseTask) -> BitwiseTask:
    """``task`` with the inputs and outputs of the final step instead of those of the reference."""
    return replace(task, inputs=task.final_inputs, outputs=task.final_outputs) if task.final_inputs else task


def _peak_bytes() -> int:
    if device() == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in KiB on Linux
    return torch.cuda.max_memory_allocated()


def _note(outcome: BitwiseOutcome, task: BitwiseTask, results: Sequence[Any]) -> set[str]:
    """Note norms of a step's gradients and what of it is not finite; the gradients that are not all zero.

    Not of a step on edge values: they move every parameter, and may make any gradient large.
    """
    outcome.squares.append(_squares(task, results))
    found = [(v, r) for v, r in zip(task.outputs, results, strict=True) if v.role in ("grad", "loss")]
    outcome.not_finite += [value.fqn or "the loss" for value, result in found if not bool(torch.isfinite(result).all())]
    return {value.fqn for value, result in found if value.role == "grad" and bool((result != 0).any())}


def _squares(task: BitwiseTask, results: Sequence[Any]) -> dict[str, float]:
    return {
        value.fqn: float(torch.linalg.vector_norm(result.to(torch.promote_types(result.dtype, torch.float64))) ** 2)
        for value, result in zip(task.outputs, results, strict=True)
        if value.role == "grad"
    }


def _parameter_digests(task: BitwiseTask, state: Sequence[torch.Tensor], results: Sequence[Any]) -> dict[str, str]:
    """By FQN, the digest of what this rank holds of each parameter: itself, the state named after it, and its gradient."""
    kept = [value for value in task.inputs if value.role in KEPT]
    gradients = {v.fqn: r for v, r in zip(task.outputs, results, strict=True) if v.role == "grad"}
    of: dict[str, list[torch.Tensor]] = {v.fqn: [] for v in kept if v.role == "param"}
    for value, tensor in zip(kept, state, strict=True):
        owner = value.fqn if value.role == "param" else value.fqn.rpartition(".")[0]
        if value.role in ("param", "state") and owner in of:
            of[owner].append(tensor)
    return {fqn: bits_digest([*tensors, *([gradients[fqn]] if fqn in gradients else [])]) for fqn, tensors in of.items()}


def _still(task: BitwiseTask, start: Sequence[torch.Tensor], state: Sequence[torch.Tensor]) -> list[str]:
    updated = {value.fqn for value in task.outputs if value.role == "param"}
    kept = [value for value in task.inputs if value.role in KEPT]
    return [
        value.fqn
        for value, before, after in zip(kept, start, state, strict=True)
        if value.role == "param" and value.fqn in updated and bool((bits(before) == bits(after.cpu())).all())
    ]


def _compare_step(step: int, rank: int, took: Sequence[tuple[StepTask, StepOutcome]]) -> Iterator[TensorDifference]:
    """Differences in every output that both steps have, and in every input as the step left it, since graphs may write it."""
    # Outputs and inputs that only one step has come from transformations that add or remove state: they have no counterpart.
    results, given = (
        [_by_key(task.outputs, one.results) for task, one in took],
        [_by_key(task.inputs, one.inputs_after) for task, one in took],
    )
    for otherwise, (ours, theirs) in (("output", results), ("input", given)):
        for key, a in ours.items():
            if key in theirs:
                yield from compare(step, rank, what_of(key[0], otherwise), key[1], a, theirs[key])


def _by_key(values: Sequence[Value], tensors: Sequence[Any]) -> dict[tuple[str, str, int], Any]:
    """``tensors`` by role, name, and number among the values of that role and name."""
    found: dict[tuple[str, str, int], Any] = {}
    for value, tensor in zip(values, tensors, strict=True):
        number = next(n for n in count() if (*value.key, n) not in found)
        found[*value.key, number] = tensor
    return found


def _compare_late(
    step: int, rank: int, before: Mapping[Key, torch.Tensor], late: Mapping[Key, torch.Tensor]
) -> Iterator[TensorDifference]:
    """Differences between what a call gave for the step before, and what the unbucketed run gave in that step."""
    for (role, fqn), result in sorted(late.items()):
        yield from compare(step - 1, rank, f"{what_of(role, 'output')} that the next call gave", fqn, before[role, fqn], result)


def what_of(role: str, otherwise: str) -> str:
    """What people call a tensor of ``role``; ``otherwise`` if nothing is known of it."""
    return {"grad": "gradient", "param": "parameter", "value": otherwise}.get(role, role)


def compare(step: int, rank: int, what: str, fqn: str, a: Any, b: Any) -> Iterator[TensorDifference]:
    """How ``b`` differs from ``a``, if it does."""
    if not isinstance(a, torch.Tensor):
        if a != b:
            yield TensorDifference(step, rank, what, fqn, 1, 1, -1)
        return
    if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        yield TensorDifference(step, rank, what, fqn, a.numel(), a.numel(), -1)
        return
    b = b.to(a.device)  # a number that the step reads may lie on the CPU in one of them
    unequal = bits(a) != bits(b)
    if bool(unequal.any()):
        # A complex number has two integers, one for each of its halves, and is one element.
        elements = unequal.reshape(a.numel(), -1).any(1).sum()
        yield TensorDifference(step, rank, what, fqn, int(elements), a.numel(), ulps_apart(a, b))


# Edge values, which ordinary data does not hold and a wrong pass may lose: zeros of both signs, denormals, large numbers.


FEWEST_STEPS = 3
"""With fewer steps none is on edge values: they may saturate the model, so the steps before must tell what they cannot."""


def is_on_edges(step: int, steps: int) -> bool:
    """Whether ``step``, from 0, of ``steps`` is the one on edge values."""
    return steps >= FEWEST_STEPS and step == steps - 1


def put_edges(tensors: Sequence[torch.Tensor], values: Sequence[Value] | None = None) -> None:
    """Overwrite the first elements of each floating tensor in place; with ``values``, one for each tensor, only of parameters.

    Ranks that held the same part of a parameter hold the same afterwards, since all write the same values.
    """
    for index, tensor in enumerate(tensors):
        if tensor.is_floating_point() and (values is None or values[index].role == "param"):
            flat = tensor.detach().flatten()
            tiny, most = torch.finfo(tensor.dtype).tiny, torch.finfo(tensor.dtype).max
            large = [min(2.0**20, most / 2), -min(2.0**15, most / 4)]
            edges = torch.tensor([-0.0, 0.0, tiny / 4, -tiny / 2, *large], dtype=tensor.dtype, device=tensor.device)
            count = min(len(edges), flat.numel())
            flat[:count] = edges[:count]
            # ``flatten`` gives a copy where the tensor is not contiguous.
            tensor.detach().copy_(flat.view(tensor.shape))
