"""Runs in the ranks: the unbucketed and the bucketed step, side by side on the same batches, compared bit for bit."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pytest_fxbucket import collector
from pytest_fxbucket.capture.from_plan import import_model
from pytest_fxbucket.capture.mesh import Mesh, make_groups
from pytest_fxbucket.capture.parallel.parts import Parts
from pytest_fxbucket.checks.bitwise import RUNS
from pytest_fxbucket.checks.placing import place
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.portable import PortableGraph, decode, digest, encode_module, raw_bytes
from pytest_fxbucket.passes.own_group import ensure_twins
from pytest_fxbucket.ranks import device, mark
from pytest_fxbucket.ranks.gpus.nccl import record

if TYPE_CHECKING:
    from pytest_fxbucket.capture.optimizers.optimizing import Optimizing
    from pytest_fxbucket.capture.roles import Parameter, Value
    from pytest_fxbucket.plan.schema import Model, Parallel

LEARNING_RATE = 0.03125
"""Of the fixed SGD update between steps: a power of two, so that the update itself rounds as little as can be."""


@dataclass(frozen=True, slots=True)
class Task:
    """What one rank is to run."""

    unbucketed: PortableGraph
    bucketed: PortableGraph
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    model: Model | None
    example_inputs: tuple[torch.Tensor, ...]
    """Of a graph that somebody else traced; used instead of a model."""
    seed: int
    steps: int
    where: str
    """Plan file, for errors."""
    mesh: Mesh
    parallel: Parallel
    parameters: tuple[Parameter, ...]
    optimizing: Optimizing | None
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
    start, batches = state_and_batches(rank, task, outcome.built)
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
            _update(state, results[-1], task)
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


def state_and_batches(
    rank: int, task: Task, built: dict[str, str] | None = None
) -> tuple[list[torch.Tensor], Callable[[int], list[torch.Tensor]]]:
    """Parameters, buffers and the optimizer's state to begin with, in input order; and the batch of a step.

    ``built`` gets the digests of whole parameters and buffers.
    """
    if task.model is None:
        split = [value.role in KEPT for value in task.inputs]
        if True in split and False in split and split.index(False) < len(split) - 1 - split[::-1].index(True):
            raise CaptureError("inputs of a traced graph must list parameters and buffers before everything else")
        state = [t.detach() for t, kept in zip(task.example_inputs, split, strict=True) if kept]
        rest = [t.detach() for t, kept in zip(task.example_inputs, split, strict=True) if not kept]
        return state, lambda step: rest
    factory, batch, _ = import_model(task.model, task.where)
    torch.manual_seed(task.seed)
    model = factory(**task.model.args)
    whole = {fqn: p.detach() for fqn, p in model.named_parameters()} | dict(model.named_buffers())
    if built is not None:
        built.update({fqn: _bits_digest([tensor]) for fqn, tensor in whole.items()})
    parts = Parts.of(task.parallel, task.mesh)
    own = {parameter.fqn: parts.of_rank(whole[parameter.fqn], parameter, rank) for parameter in task.parameters}
    kept = {("param", fqn): part for fqn, part in own.items()}
    kept |= {("buffer", fqn): buffer for fqn, buffer in model.named_buffers()}
    if task.optimizing is not None:
        kept |= task.optimizing.state(own, {value.fqn for value in task.outputs if value.role == "grad"})
    state = [kept[value.role, value.fqn] for value in task.inputs if value.role in KEPT]

    def tensors(step: int) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves(batch(task.mesh.data_rank(rank), step))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    return state, tensors


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


KEPT = ("param", "buffer", "state", "hyper")
"""Roles of what lives on from step to step."""


def _update(state: list[torch.Tensor], results: Sequence[Any], task: Task) -> None:
    """What the step made of parameters and state; of a step without optimizer one SGD step on the local shards."""
    made = {(v.role, v.fqn): r for v, r in zip(task.outputs, results, strict=True)}
    has_optimizer = any(role in ("param", "state") for role, _ in made)
    for value, tensor in zip(task.inputs, state, strict=False):
        if (value.role, value.fqn) in made:
            tensor.copy_(made[value.role, value.fqn])
        elif value.role == "param" and not has_optimizer and ("grad", value.fqn) in made:
            tensor.add_(made["grad", value.fqn].to(tensor.dtype), alpha=-LEARNING_RATE)


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
