"""Runs in the ranks: the unbucketed and the bucketed step, side by side on the same batches, compared bit for bit."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pytest_fxbucket import collector
from pytest_fxbucket.capture.mesh import make_groups
from pytest_fxbucket.checks.bitwise import RUNS
from pytest_fxbucket.checks.placing import place
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.portable import PortableGraph, decode, digest, encode_module, raw_bytes
from pytest_fxbucket.passes.own_group import ensure_twins
from pytest_fxbucket.ranks import device, mark
from pytest_fxbucket.ranks.gpus.nccl import record
from pytest_fxbucket.stepping import KEPT, Stepping, state_and_batches, update


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Stepping):
    """What one rank is to run."""

    unbucketed: PortableGraph
    bucketed: PortableGraph
    steps: int
    backend: str = "gloo"
    """What its ranks run on; says which settings are to be recorded."""
    localise_step: int | None = None
    """Step to compare node by node; None: compare results only."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that differs on one rank after one step."""

    step: int
    rank: int
    what: str
    """loss, gradient, parameter, buffer, output."""
    fqn: str
    elements: int
    """How many differ."""
    numel: int
    ulps: int
    """Largest distance in units in the last place; -1 where it has no meaning (NaN against number, integers)."""


@dataclass(slots=True)
class Outcome:
    """What one rank saw."""

    digests: tuple[str, str]
    """Of the graphs that ran: unbucketed, bucketed."""
    differences: list[Difference] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    """Digest of the batch of each step."""
    built: dict[str, str] = field(default_factory=dict)
    """Digest of each whole parameter and buffer as the model's factory made it."""
    held: dict[str, str] = field(default_factory=dict)
    """Digest of this rank's part of each parameter, its gradient and state after the last step, unbucketed."""
    still: list[str] = field(default_factory=list)
    """FQNs of parameters that the optimizer left as they were."""
    losses: list[str] = field(default_factory=list)
    """Digest of the unbucketed loss of each step."""
    squares: list[dict[str, float]] = field(default_factory=list)
    """Of each step the squared norm of this rank's part of each gradient."""
    zero: list[str] = field(default_factory=list)
    """FQNs of gradients that were all zero in every step."""
    not_finite: list[str] = field(default_factory=list)
    first_node: tuple[int, str, str] | None = None
    """(position in the bucketed graph, node name, operator) of the first node whose bits differ."""
    peak_bytes: int = 0
    """Largest resident size of the rank's process so far; on a GPU, most memory of it that the rank's tensors took."""
    ran_on: tuple[str, ...] = ()
    """Settings that sums on GPUs depend on, ``name=value`` each."""


def run(rank: int, world: int, task: Task) -> Outcome:
    """Run ``task.steps`` steps of both graphs from the same state and compare after each."""
    with collector.paused():
        graphs = decode(task.unbucketed), decode(task.bucketed)
        outcome = Outcome((digest(encode_module(graphs[0])), digest(encode_module(graphs[1]))))
    make_groups(task.mesh, rank)
    for graph in graphs:
        ensure_twins(graph.graph)
        place(graph, device())
    outcome.ran_on = record(task.backend)
    start, batches = state_and_batches(
        rank, task, on_built=lambda whole: outcome.built.update({fqn: _bits_digest([one]) for fqn, one in whole.items()})
    )
    states = [[tensor.to(device(), copy=True) for tensor in start] for _ in graphs]
    zero = {value.fqn for value in task.outputs if value.role == "grad"}
    for step in range(task.steps):
        batch = [tensor.to(device()) for tensor in batches(step)]
        outcome.batches.append(_bits_digest(batch))
        if step == task.localise_step:
            outcome.first_node = _first_difference(graphs, states, batch, task, step)
            return outcome
        results, given = [], []
        for graph, state, name in zip(graphs, states, RUNS, strict=True):
            mark(f"{name} step {step + 1} of {task.steps}")
            torch.manual_seed(task.seed + step)
            given.append([*state, *(tensor.clone() for tensor in batch)])
            outputs = graph(*given[-1])
            results.append(list(outputs) if isinstance(outputs, (list, tuple)) else [outputs])
            update(state, results[-1], task)
        outcome.differences += _compare_step(step, rank, task, given, results)
        losses = [result for value, result in zip(task.outputs, results[0], strict=True) if value.role == "loss"]
        outcome.losses.append(_bits_digest(losses))
        outcome.squares.append(_squares(task, results[0]))
        for value, result in zip(task.outputs, results[0], strict=True):
            if value.role in ("grad", "loss") and not bool(torch.isfinite(result).all()):
                outcome.not_finite.append(value.fqn or "the loss")
            if value.role == "grad" and bool((result != 0).any()):
                zero.discard(value.fqn)
    outcome.zero = sorted(zero)
    outcome.held = _held(task, states[0], results[0])
    outcome.still = _still(task, start, states[0])
    outcome.peak_bytes = _peak_bytes()
    return outcome


def _peak_bytes() -> int:
    if device() == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_allocated()


def _squares(task: Task, results: Sequence[Any]) -> dict[str, float]:
    return {
        value.fqn: float(torch.linalg.vector_norm(result.double()) ** 2)
        for value, result in zip(task.outputs, results, strict=True)
        if value.role == "grad"
    }


def _held(task: Task, state: Sequence[torch.Tensor], results: Sequence[Any]) -> dict[str, str]:
    """By FQN the digest of what this rank holds of each parameter: itself, what state is named after it, its gradient."""
    kept = [value for value in task.inputs if value.role in KEPT]
    gradients = {v.fqn: r for v, r in zip(task.outputs, results, strict=True) if v.role == "grad"}
    of: dict[str, list[torch.Tensor]] = {v.fqn: [] for v in kept if v.role == "param"}
    for value, tensor in zip(kept, state, strict=True):
        owner = value.fqn if value.role == "param" else value.fqn.rpartition(".")[0]
        if value.role in ("param", "state") and owner in of:
            of[owner].append(tensor)
    return {fqn: _bits_digest([*tensors, *([gradients[fqn]] if fqn in gradients else [])]) for fqn, tensors in of.items()}


def _still(task: Task, start: Sequence[torch.Tensor], state: Sequence[torch.Tensor]) -> list[str]:
    updated = {value.fqn for value in task.outputs if value.role == "param"}
    kept = [value for value in task.inputs if value.role in KEPT]
    return [
        value.fqn
        for value, before, after in zip(kept, start, state, strict=True)
        if value.role == "param" and value.fqn in updated and bool((bits(before) == bits(after.cpu())).all())
    ]


def _compare_step(
    step: int, rank: int, task: Task, given: Sequence[Sequence[torch.Tensor]], results: Sequence[Sequence[Any]]
) -> Iterator[Difference]:
    """Every output, and every input as the step left it: a graph may write to any of them."""
    names = {"grad": "gradient", "param": "parameter"}
    for value, a, b in zip(task.outputs, *results, strict=True):
        yield from _compare(
            step, rank, names.get(value.role, "output" if value.role == "value" else value.role), value.fqn, a, b
        )
    for value, a, b in zip(task.inputs, *given, strict=True):
        yield from _compare(
            step, rank, names.get(value.role, "input" if value.role == "value" else value.role), value.fqn, a, b
        )


def _compare(step: int, rank: int, what: str, fqn: str, a: Any, b: Any) -> Iterator[Difference]:
    if not isinstance(a, torch.Tensor):
        if a != b:
            yield Difference(step, rank, what, fqn, 1, 1, -1)
        return
    if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        yield Difference(step, rank, what, fqn, a.numel(), a.numel(), -1)
        return
    unequal = bits(a) != bits(b)
    if bool(unequal.any()):
        elements = unequal.reshape(a.numel(), -1).any(1).sum()
        yield Difference(step, rank, what, fqn, int(elements), a.numel(), ulps_apart(a, b))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGNED = {**_INTEGERS, 1: torch.int8}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers of the same size, flat: signed zeros and NaNs differ as their bits do."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def ulps_apart(a: torch.Tensor, b: torch.Tensor) -> int:
    """Largest distance in units in the last place; -1 where it has no meaning.

    That is for what is no float, if one is NaN where the other is not, and if nothing but NaNs is left to compare.
    """
    if not a.is_floating_point() or bool((a.isnan() != b.isnan()).any()):
        return -1
    numbers = ~a.isnan().reshape(-1)
    low, high = torch.aminmax(torch.stack([_ordered(a)[numbers], _ordered(b)[numbers]]), dim=0)
    if not low.numel():
        return -1
    apart = high - low
    wrapped = apart[apart < 0]  # float64 of opposite signs: more than int64 holds, and right modulo 2 ** 64
    return int(wrapped.max()) + (1 << 64) if wrapped.numel() else int(apart.max())


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats, neighbours one apart; both zeros are 0."""
    raw = bits(tensor).view(_SIGNED[tensor.element_size()]).to(torch.int64)
    low = -(1 << (8 * tensor.element_size() - 1))
    return torch.where(raw < 0, low - raw, raw)


def _bits_digest(tensors: Sequence[torch.Tensor]) -> str:
    text = hashlib.sha256()
    for tensor in tensors:
        text.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        text.update(raw_bytes(tensor))
    return text.hexdigest()


def _first_difference(
    graphs: tuple[fx.GraphModule, fx.GraphModule],
    states: Sequence[Sequence[torch.Tensor]],
    batch: Sequence[torch.Tensor],
    task: Task,
    step: int,
) -> tuple[int, str, str] | None:
    """First node of the bucketed graph that the unbucketed one has too, and whose bits differ. All ranks run this together."""
    seen: list[dict[str, str]] = []
    for graph, state, name in zip(graphs, states, RUNS, strict=True):
        mark(f"{name} step {step + 1} of {task.steps}, node by node")
        torch.manual_seed(task.seed + step)
        recorder = _Recorder(graph)
        recorder.run(*(tensor.clone() for tensor in state), *(tensor.clone() for tensor in batch))
        seen.append(recorder.seen)
    targets = {node.name: str(node.target) for node in graphs[0].graph.nodes}
    for position, node in enumerate(graphs[1].graph.nodes):
        if node.name in seen[0] and seen[0][node.name] != seen[1].get(node.name) and targets[node.name] == str(node.target):
            return position, node.name, str(node.target)
    return None


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps a digest of each value that has arrived."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.seen: dict[str, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        in_flight = collectives.launch_kind(n) is not None or any(
            collectives.launch_kind(source) is not None for source in n.all_input_nodes if not collectives.is_wait(n)
        )
        if not in_flight and n.op not in ("placeholder", "output"):
            self.seen[n.name] = _bits_digest([t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)])
        return result
