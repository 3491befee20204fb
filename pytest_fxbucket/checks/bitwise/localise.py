"""Finds the first node at which two runs of a step differ; and bits of tensors, as integers, as distances, as digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pytest_fxbucket.compat import pytree
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import effects_of
from pytest_fxbucket.graph.ops import UNWRITTEN, is_view, operator_name
from pytest_fxbucket.step.portable import raw_bytes
from pytest_fxbucket.step_runner import Seen, ThreeGraphs, set_rates

if TYPE_CHECKING:
    from pytest_fxbucket.pipeline.rank_stage import Crossed
    from pytest_fxbucket.pipeline.running import PipelinedRun
    from pytest_fxbucket.step_runner import StepRun, StepTask

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGNED = {**_INTEGERS, 1: torch.int8}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers of the same size, flat: signed zeros and NaNs differ as their bits do."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def ulps_apart(a: torch.Tensor, b: torch.Tensor) -> int:
    """Largest distance in units in the last place; -1 where it has no meaning.

    It has none for tensors that are not of floats, if one is NaN where the other is not, and if there are only NaNs.
    """
    if not a.is_floating_point() or bool((a.isnan() != b.isnan()).any()):
        return -1
    numbers = ~a.isnan().reshape(-1)
    # Of each pair the smaller and the larger, so that only a difference that wraps is negative.
    low, high = torch.aminmax(torch.stack([_ordered(a)[numbers], _ordered(b)[numbers]]), dim=0)
    if not low.numel():
        return -1
    apart = high - low
    wrapped = apart[apart < 0]  # float64 of opposite signs: more than int64 holds, and right modulo 2 ** 64
    return int(wrapped.max()) + (1 << 64) if wrapped.numel() else int(apart.max())


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats, neighbours one apart; both zeros are 0."""
    # The bits of negative floats, as signed integers, ascend while the floats descend: they are mirrored below zero.
    raw = bits(tensor).view(_SIGNED[tensor.element_size()]).to(torch.int64)
    low = -(1 << (8 * tensor.element_size() - 1))
    return torch.where(raw < 0, low - raw, raw)


def bits_digest(tensors: Sequence[torch.Tensor]) -> str:
    """Hex digest of shapes, dtypes and bits."""
    text = hashlib.sha256()
    for tensor in tensors:
        text.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        text.update(raw_bytes(tensor))
    return text.hexdigest()


# Where two runs of a step part: the first node that both graphs have and whose bits differ.


Batch = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where two runs of a step part."""

    node: tuple[int, str, str] | None = None
    """(position in its graph, node name, operator) of the first node whose bits differ."""
    graph: str = "bucketed"
    """The graph of that node: bucketed, or setup, steady, cleanup."""
    gone: tuple[tuple[str, str], ...] = ()
    """Where no node differs: (name, operator) of each node of the first run that writes or draws, and the second has not."""


def first_difference(
    runs: Sequence[StepRun], batches: Sequence[Batch | None], task: StepTask, step: int, count: int
) -> FirstDifference:
    """Take ``step`` (from 0) of ``count`` with both ``runs``, node by node. All ranks do this together.

    ``batches`` are those of the step and of the next one. Gives the first node of the second run's graphs that the first run's
    graph has too, and whose bits differ.
    """
    # If work crosses iterations, the second run takes the next step as well: there the steady graph runs the moved nodes of
    # this step, which so far only clean-up ran, on copies.
    for number, batch in enumerate(batches):
        for one in runs[number:]:
            if batch is not None and (number == 0 or isinstance(one, ThreeGraphs)):
                one.watch = run_with_digests
                # As every step is seeded, so that both runs draw the same numbers.
                torch.manual_seed(task.seed + step + number)
                one.step([tensor.clone() for tensor in batch], step + number + 1, count)
        set_rates(runs, step + number + 1)
    # Nodes are matched by name and target. Those that a pass made, as packs, match none, and the difference shows behind them.
    (_, unbucketed, reference), *_ = runs[0].seen
    targets = {node.name: str(node.target) for node in unbucketed.graph.nodes}
    for name, graph, digests in _of_the_step(runs[1]):
        for position, node in enumerate(graph.graph.nodes):
            known = reference.get(node.name, "") if targets.get(node.name) == str(node.target) else ""
            if known and node.name in digests and digests[node.name] != known:
                return FirstDifference((position, node.name, str(node.target)), name)
    kept = {(node.name, str(node.target)) for _, graph, _ in _of_the_step(runs[1]) for node in graph.graph.nodes}
    acting = [(node.name, str(node.target)) for node in unbucketed.graph.nodes if effects_of(node).acts]
    return FirstDifference(gone=tuple(one for one in acting if one not in kept))


def what_crossed(run: PipelinedRun, batch: Batch, step: int, task: StepTask) -> tuple[dict[Crossed, str], dict[Crossed, str]]:
    """Take ``step`` (from 0) in pipeline stages; gives digests of what this rank's stages made for others, and received."""
    torch.manual_seed(task.seed + step)
    run.taken(batch, f"step {step + 1}")
    digests = [(received, of, bits_digest([value])) for received, of, value in run.crossed()]
    made, received = ({of: digest for was, of, digest in digests if was is here} for here in (False, True))
    return made, received


def _of_the_step(run: StepRun) -> Iterator[Seen]:
    """The graphs that ``run`` ran, each with the digests of those of its nodes that belong to the step to localise."""
    if not isinstance(run, ThreeGraphs):
        yield from run.seen
        return
    # In order: the graph of the step, its clean-up, and the graph of the next step. In the first one moved nodes belong to the
    # step before; in the third one only they belong to this step.
    first, *others = run.seen
    for number, (name, graph, digests) in enumerate([first, *others[:2]]):
        own = {
            node: known for node, known in digests.items() if name == "cleanup" or (node in run.moved_names) == (number == 2)
        }
        yield name, graph, own


def run_with_digests(graph: fx.GraphModule, *given: torch.Tensor) -> tuple[Any, dict[str, str]]:
    """Results of ``graph``, and by node the digest of each value that has arrived."""
    recorder = _Recorder(graph)
    return recorder.run(*given), recorder.seen


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps a digest of each value, but not of those in flight or unwritten, whose bytes may still change."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.seen: dict[str, str] = {}
        self._unwritten: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        # A view or an item of what a launch gives is in flight, too.
        in_flight = collectives.launch_kind(n) is not None or any(
            collectives.launch_kind(source) is not None for source in n.all_input_nodes if not collectives.is_wait(n)
        )
        if operator_name(n) in UNWRITTEN or (is_view(n) and n.all_input_nodes[0] in self._unwritten):
            self._unwritten.add(n)
        elif not in_flight and n.op not in ("placeholder", "output"):
            self.seen[n.name] = bits_digest(pytree.tensors_in(result))
        return result
