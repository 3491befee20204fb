"""A microbatch's graph, parted into forward and backward of each stage, and what goes from part to part.

Time runs through the stages forward, and back from the last to the first. A node is of the part that it is marked with, or of a
later one if it needs something from there. Values go the way of time, from stage to stage: forward to the last stage that reads
them in either direction, backward from the stage that made them to the first that reads them there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.capture.backward import StageRead
from pytest_fxbucket.capture.draws import draws
from pytest_fxbucket.capture.functionalize import make_functional
from pytest_fxbucket.capture.names import STAGE
from pytest_fxbucket.compat.fx import uncompiled
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.collectives import argument
from pytest_fxbucket.graph.effects import effects_of, written_arguments
from pytest_fxbucket.graph.modules import module_of
from pytest_fxbucket.graph.ops import held_by, operator_name, overload, returned
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.pipeline.microbatch import Microbatch
from pytest_fxbucket.step.pipelined import Crossing, Work
from pytest_fxbucket.step.roles import Value


@dataclass(frozen=True)
class StagePart:
    """Work of one stage on one microbatch as a graph."""

    stage: int
    work: Work
    graph_module: fx.GraphModule
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class MicrobatchParts:
    """All parts of a microbatch: for each stage forward and backward, and backward's two halves, input and weight.

    Each part is made when it is asked for, since a rank has few of them.
    """

    def __init__(self, timed: _Timed) -> None:
        self._timed, self._stages = timed, timed.stages
        self._parts: dict[tuple[int, Work], StagePart] = {}
        forward, self._gives = timed.flows()
        described = {node: timed.described(node) for flow in (*forward, *self._gives) for node in flow}
        self.forward, self.backward = (
            tuple(tuple(map(described.__getitem__, flow)) for flow in flows) for flows in (forward, self._gives)
        )
        """What crosses each cut, in the form of the fields of :class:`~pytest_fxbucket.step.pipelined.Pipelined`."""

    def part(self, stage: int, work: Work) -> StagePart:
        """The part of ``stage`` that does ``work``."""
        if (stage, work) not in self._parts:
            self._parts[stage, work] = self._new_part(stage, work)
        return self._parts[stage, work]

    def _new_part(self, stage: int, work: Work) -> StagePart:
        timed = self._timed
        if work == "forward":
            return timed.part(stage, work, timed.nodes_at(stage))
        behind = timed.nodes_at(timed.backward_of(stage))
        if work == "backward":
            return timed.part(stage, work, behind)
        # ``input`` is all that the values sent back are computed from, ``weight`` the rest. Stage 0 sends nothing back.
        first = timed.made_of(self._gives[stage - 1] if stage else (), behind)
        if work == "input":
            return timed.part(stage, work, [node for node in behind if node in first])
        return timed.part(stage, work, [node for node in behind if node not in first], first)


def part_microbatch(microbatch: Microbatch, stages: int) -> MicrobatchParts:
    """Part ``microbatch``, whose graph may be rewritten, into ``stages``.

    Raises :class:`CaptureError` for what would be otherwise than in the whole step.
    """
    return MicrobatchParts(_Timed(microbatch, stages))


class _Timed:
    """A graph whose nodes have times: ``stage`` in forward, ``2 * stages - 1 - stage`` in backward."""

    def __init__(self, microbatch: Microbatch, stages: int) -> None:
        self.microbatch, self.stages, self.graph = microbatch, stages, microbatch.graph_module.graph
        self._refuse_draws()
        placeholders = self.graph.find_nodes(op="placeholder")
        self.given: dict[fx.Node, Value] = dict(zip(placeholders, microbatch.inputs, strict=True))
        # Parameters and buffers: each stage has those that it reads, so they never cross.
        self.everywhere = {node for node, value in self.given.items() if value.role != "batch"}
        self.order = order_of(self.graph)
        self.times = self._times()
        if across := self._written_across():
            # The rewrite puts nodes in and takes the order of writes out, so order and times are found anew.
            make_functional(self.graph, across)
            self.order = order_of(self.graph)
            self.times = self._times()
        self.loss: fx.Node
        self.loss, *gradients = returned(self.graph.output_node())
        self.gradients: dict[StageRead, fx.Node] = dict(zip(microbatch.reads, gradients, strict=True))
        self._gradient_of: dict[fx.Node, list[int]] = {}
        for read, node in self.gradients.items():
            self._gradient_of.setdefault(node, []).append(read.stage)
        self._refuse_late_gradients()

    def _times(self) -> dict[fx.Node, int]:
        # A node runs at the time that it is marked with, but no earlier than anything that must stay before it, order that
        # edges do not carry included. So times never descend along the order, and each part can run behind all parts of earlier
        # times.
        times: dict[fx.Node, int] = {}
        for index, node in enumerate(self.order.nodes):
            stage = node.meta.get(STAGE)
            if node.op in ("placeholder", "get_attr") or stage is None:
                own = 0
            else:
                own = self.backward_of(stage) if node.meta.get("autograd_backward") else stage
            times[node] = max((own, *(times[self.order.nodes[before]] for before in self.order.before[index])))
        del times[self.order.nodes[-1]]  # the output node, which is of no part
        return times

    def backward_of(self, stage: int) -> int:
        """The time at which ``stage`` goes backward."""
        return 2 * self.stages - 1 - stage

    def stage_at(self, time: int) -> int:
        """The stage that works at ``time``."""
        return min(time, 2 * self.stages - 1 - time)

    def nodes_at(self, time: int) -> list[fx.Node]:
        """Nodes that compute at ``time``, in order."""
        return self._nodes_at.get(time, [])

    @cached_property
    def _nodes_at(self) -> dict[int, list[fx.Node]]:
        found: dict[int, list[fx.Node]] = {}
        for node, time in self.times.items():
            if node.op not in ("placeholder", "get_attr"):
                found.setdefault(time, []).append(node)
        return found

    def flows(self) -> tuple[list[list[fx.Node]], list[list[fx.Node]]]:
        """For each cut what crosses it forward, and what backward, in the order of the graph."""
        forward: list[list[fx.Node]] = [[] for _ in range(self.stages - 1)]
        backward: list[list[fx.Node]] = [[] for _ in range(self.stages - 1)]
        uses = self._uses()
        for node, made in self.times.items():
            if node in self.everywhere or node.op == "get_attr":
                continue
            # Forward up to the last stage that reads the value at any time. The range is empty for a value made in backward,
            # whose time is beyond all stages.
            read = [(time, self.stage_at(time)) for time in uses.get(node, ())]
            for cut in range(made, max((stage for _, stage in read), default=0)):
                forward[cut].append(node)
            # Back from the stage that made it to the first that reads it in backward, be it made in forward or in backward.
            first = min((stage for time, stage in read if time >= self.stages), default=self.stages)
            for cut in range(first, self.stage_at(made)):
                backward[cut].append(node)
        return forward, backward

    def _uses(self) -> dict[fx.Node, set[int]]:
        """Times at which each node is read. The last stage gives the loss, and a stage gives its gradients in its backward."""
        uses: dict[fx.Node, set[int]] = {self.loss: {self.stages - 1}}
        for node, time in self.times.items():
            for source in node.all_input_nodes:
                uses.setdefault(source, set()).add(time)
        for read, node in self.gradients.items():
            uses.setdefault(node, set()).add(self.backward_of(read.stage))
        return uses

    def made_of(self, wanted: Iterable[fx.Node], among: Sequence[fx.Node]) -> set[fx.Node]:
        """Nodes ``among`` those of a stage's backward that the values ``wanted`` by the stage before are computed from."""
        needed = {self.order.index[node] for node in wanted}
        for index in sorted((self.order.index[node] for node in among), reverse=True):
            if index in needed:
                needed.update(self.order.before[index])
        return {node for node in among if self.order.index[node] in needed}

    def described(self, node: fx.Node) -> Crossing:
        """``node`` as what crosses."""
        value, stage = node.meta["val"], self.stage_at(self.times[node])
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"{node.name}, a value of type {type(value).__name__}, is made in stage {stage} and read in another, but only "
                "tensors can cross; put the cut elsewhere"
            )
        name = self.given[node].fqn if node in self.given else node.name
        return Crossing.of(name, module_of(node), stage, value)

    def part(self, stage: int, work: Work, nodes: Sequence[fx.Node], done: Collection[fx.Node] = ()) -> StagePart:
        """A graph of ``nodes``: parameters and buffers are its first inputs, loss and gradients its first outputs.

        ``done`` are nodes of the stage's other part of backward, which has given their gradients.
        """
        own, graph, copies, constants = set(nodes), fx.Graph(), dict[fx.Node, fx.Node](), dict[str, Any]()
        results = self._results(stage, work, own, done)
        read = {source for node in nodes for source in node.all_input_nodes} | {node for _, node in results}
        taken = sorted(
            (node for node in read - own if node.op != "get_attr"),
            key=lambda node: (node not in self.everywhere, self.order.index[node]),
        )
        for node in taken:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)

        def copy_of(node: fx.Node) -> fx.Node:
            if node not in copies:  # an attribute of the graph: nodes of every other kind were copied before
                copies[node] = graph.node_copy(node)
                constants[str(node.target)] = held_by(self.microbatch.graph_module, str(node.target))
            return copies[node]

        for node in nodes:
            copies[node] = graph.node_copy(node, copy_of)
        results += [(self._value(node), node) for node in nodes if self._is_read_elsewhere(node, own, stage)]
        graph.output([copy_of(node) for _, node in results])
        graph.lint()
        inputs = tuple(map(self._value, taken))
        return StagePart(stage, work, uncompiled(constants, graph), inputs, tuple(value for value, _ in results))

    def _results(
        self, stage: int, work: Work, own: Collection[fx.Node], done: Collection[fx.Node]
    ) -> list[tuple[Value, fx.Node]]:
        """The loss and the gradients that a part gives, which no other part takes."""
        if work == "forward":
            value = Value("loss", "", (), self.loss.meta["val"].dtype)
            return [(value, self.loss)] if stage == self.stages - 1 else []
        found = []
        for read, node in self.gradients.items():
            # A gradient may be made before this backward, as in that of a later stage, and crosses to here: the part that
            # runs last gives it, while ``input`` gives only gradients that it makes.
            if read.stage == stage and node not in done and (work != "input" or node in own):
                value = node.meta["val"]
                found.append((Value("unreduced", read.fqn, tuple(value.shape), value.dtype), node))
        return found

    def _is_read_elsewhere(self, node: fx.Node, own: Collection[fx.Node], stage: int) -> bool:
        """Whether another part takes ``node``: a part that reads it, or one of another stage that gives it as a gradient."""
        if any(user not in own and user.op != "output" for user in node.users):
            return True
        return any(other != stage for other in self._gradient_of.get(node, ()))

    def _value(self, node: fx.Node) -> Value:
        """``node`` as what a part takes, or gives to another one."""
        if node in self.given:
            return self.given[node]
        value = node.meta["val"]
        return Value("crossing", node.name, tuple(getattr(value, "shape", ())), getattr(value, "dtype", None))

    # Refused: graphs of which the parts would compute something else than the whole step does.

    def _refuse_draws(self) -> None:
        for node in self.graph.nodes:
            op = overload(node)
            if op is not None and effects_of(node).random and draws(op, node.args, node.kwargs):
                raise CaptureError(
                    f"{module_of(node) or 'the model'} draws random numbers ({node.target}), in an order that the schedule "
                    "would change; set its dropout to 0, or draw in the batch"
                )

    def _refuse_late_gradients(self) -> None:
        for read, node in self.gradients.items():
            if self.times[node] > self.backward_of(read.stage):
                raise CaptureError(
                    f"the gradient of {read.fqn}, which stage {read.stage} reads, is made in stage "
                    f"{self.stage_at(self.times[node])} ({node.name}), whose backward comes later; put the cut elsewhere"
                )

    def _written_across(self) -> list[fx.Node]:
        """Nodes that write what another part made."""
        order = self.order
        writing = {node: written for node in self.times if (written := written_arguments(node))}
        if not writing:
            return []
        # Each stage has parameters and buffers of its own, so a write to one must be seen by a single part.
        kept = {storage: node for node in self.everywhere for storage in order.storages(node)}
        made: dict[int, int] = {}
        for node, time in self.times.items():
            for storage in order.storages(node):
                made.setdefault(storage, time)
        across = []
        for node, written in writing.items():
            time = self.times[node]
            storages = {storage for one in written for storage in order.storages(one)}
            for storage in sorted(storages & kept.keys()):
                readers = (order.nodes[index] for index in order.readers(storage))
                times = {self.times[one] for one in readers if one in self.times and not _gives_statistics(one, kept[storage])}
                self._refuse_seen_elsewhere(kept[storage], node, times)
            # By time and not by stage: forward and backward of one stage are two parts, too.
            if any(made[storage] != time for storage in storages - kept.keys()):
                across.append(node)
        return across

    def _refuse_seen_elsewhere(self, buffer: fx.Node, writer: fx.Node, times: Collection[int]) -> None:
        time = self.times[writer]
        if others := sorted(other for other in times if other != time):
            where = "backward of stage" if others[0] >= self.stages else "stage"
            raise CaptureError(
                f"{self.given[buffer].fqn} is written in place in stage {self.stage_at(time)} ({writer.target}) and read in "
                f"{where} {self.stage_at(others[0])}, too, which may run before or behind it; put the cut where one stage has "
                "it alone"
            )


def _gives_statistics(node: fx.Node, buffer: fx.Node) -> bool:
    """Whether ``node``, the backward of a BatchNorm in training, is only given its ``buffer``: it reads those of the batch."""
    if operator_name(node) != "aten::native_batch_norm_backward" or not argument(node, "train"):
        return False
    return all(argument(node, name) is not buffer for name in ("grad_out", "input", "weight"))
