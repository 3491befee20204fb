"""One stage on its rank: what it received, keeps and sends of each microbatch, and the gradients that it sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pytest_fxbucket.compat.pipelining import RankStage, Transfer
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.pipeline.schedules import Action
from pytest_fxbucket.step.pipelined import Crossing, Pipelined, Work
from pytest_fxbucket.step.roles import Value

Run = Callable[[int, Work, int | None, Callable[[Value], Any]], list[tuple[Value, Any]]]
"""Runs a stage's graph for some work, on a microbatch or (None) once a step; the callable gives the tensor of each input."""
Kept = Mapping[tuple[str, str], Any]
"""Inputs of the rank's step, such as parameters and buffers, by role and name."""

Crossed = tuple[str, int, int, str]
"""Identity of a value that crossed a cut: direction, the stage that sends it, microbatch, name."""


class RunnableStage(RankStage):
    """A stage as torch's schedule drives it: torch says what comes next, ``run`` runs the stage's graphs."""

    def __init__(self, index: int, how: Pipelined, device: str, run: Run, sums: Mapping[str, Value], asked: list[str]) -> None:
        """``sums``: gradients to reduce by FQN, in the dtype of their sums; ``asked`` gets each action that torch asks for."""
        super().__init__(index, how.stages, device, how.group, dict(enumerate(how.pp_places)))
        self._run, self._sums, self._asked = run, sums, asked
        self._receives, self._sends = _around(how.forward, index)
        self._gives, self._gets = _around(how.backward, index)
        self._kept: Kept = {}
        self._rows: Sequence[Mapping[str, torch.Tensor]] = ()
        self._whole: dict[str, torch.Tensor] | None = None
        self._values: dict[int, dict[str, Any]] = {}
        self._made: dict[int, dict[str, torch.Tensor]] = {}
        self._summed = 0
        self._done: set[tuple[Work, int]] = set()
        self.losses: dict[int, torch.Tensor] = {}
        self.totals: dict[str, torch.Tensor] = {}
        """Sums of gradients, not reduced, by FQN."""
        self.gradients: dict[str, torch.Tensor] = {}
        """Reduced gradients, by FQN."""

    def begin(self, kept: Kept, rows: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Forget the step before; ``rows`` are the tensors of the batch for each microbatch, by name."""
        self._kept, self._rows, self._whole, self._summed = kept, rows, None, 0
        self._values, self._made = {number: {} for number in range(len(rows))}, {number: {} for number in range(len(rows))}
        self._done, self.losses, self.totals, self.gradients = set(), {}, {}, {}

    def unshard(self) -> None:
        """Gather the stage's parameters, once a step."""
        if self._whole is None:
            made = self._run(self.stage_index, "unshard", None, lambda value: self._kept[value.key])
            self._whole = {value.fqn: tensor for value, tensor in made}

    # The methods that torch's schedules call.

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> Any:
        """Run forward; give the loss in the last stage, what is sent on in others."""
        # A schedule of one stage a rank has no UNSHARD, so the first forward gathers.
        self._note("F", fwd_chunk_id)
        self.unshard()
        self._compute("forward", fwd_chunk_id)
        return self.losses[fwd_chunk_id] if self.is_last else self._named(fwd_chunk_id, self._sends)

    def backward_one_chunk(self, bwd_chunk_id: int, *_: Any, full_backward: bool = True, **__: Any) -> None:
        """Run all of backward, or only the part that the stage before waits for."""
        self._note("B" if full_backward else "I", bwd_chunk_id)
        # A stage has a graph either for ``backward`` or for its parts ``input`` and ``weight``; work without a graph does
        # nothing.
        self._compute("backward", bwd_chunk_id)
        self._compute("input", bwd_chunk_id)
        if full_backward:
            self._rest_of_backward(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *_: Any, **__: Any) -> None:
        """Run the part of backward that no other stage waits for."""
        self._note("W", bwd_chunk_id)
        self._rest_of_backward(bwd_chunk_id)

    def _rest_of_backward(self, microbatch: int) -> None:
        """Run the weight gradients; add up gradients in the order of microbatches, whatever order the schedule has."""
        self._compute("weight", microbatch)
        # Sums of floats depend on their order, so a microbatch that is early waits in ``_made`` for those before it. The empty
        # name marks a microbatch that has all its gradients.
        done = self._made[microbatch]
        done[""] = torch.empty(0)
        while self._summed in self._made and "" in self._made[self._summed]:
            for fqn, gradient in self._made.pop(self._summed).items():
                if fqn:
                    before = self.totals.get(fqn)
                    self.totals[fqn] = (gradient if before is None else before + gradient).to(self._sums[fqn].dtype)
            self._summed += 1

    def perform_reduce_grad(self, *_: Any, **__: Any) -> None:
        """Reduce the sums. Raises CaptureError while gradients are missing."""
        self._note("REDUCE_GRAD")
        if self._summed < len(self._rows):
            raise CaptureError(
                f"stage {self.stage_index} is to reduce gradients before those of microbatch {self._summed} are there"
            )
        made = self._run(self.stage_index, "reduce", None, lambda value: self.totals[value.fqn])
        self.gradients = {value.fqn: tensor for value, tensor in made}

    def crossed(self) -> Iterator[tuple[bool, Crossed, torch.Tensor]]:
        """Every value that crossed the cuts around the stage: whether it was received here, its identity, its tensor."""
        flows = (
            (False, "forward", self.stage_index, self._sends),
            (True, "forward", self.stage_index - 1, self._receives),
            (False, "backward", self.stage_index, self._gives),
            (True, "backward", self.stage_index + 1, self._gets),
        )
        for received, direction, stage, flow in flows:
            for microbatch in self._values:
                for one in flow:
                    yield received, (direction, stage, microbatch, one.name), self._value(one.name, microbatch)

    def clear_runtime_states(self) -> None:
        """Do nothing: :meth:`begin` clears what the step before left."""

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """Do nothing: sent values are kept until the step ends, to be compared. torch calls this from 2.15 on."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """The receives of what the stage before sends."""
        return [] if self.is_first else self._receiving("forward", fwd_chunk_id, self._receives, self.stage_index - 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """The sends to the next stage."""
        return [] if self.is_last else self._sending("forward", fwd_chunk_id, self._sends, self.stage_index + 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """The receives of what the next stage sends back."""
        return [] if self.is_last else self._receiving("backward", bwd_chunk_id, self._gets, self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """The sends back to the stage before."""
        return [] if self.is_first else self._sending("backward", bwd_chunk_id, self._gives, self.stage_index - 1)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take what the stage before sends, where it is on this rank, too."""
        self._values[mb_index] |= _own(self._receives, prev_stage_outputs)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Any, ...]:
        """What is sent back to the stage before, where it is on this rank, too."""
        return self._named(mb_index, self._gives)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Any, ...], mb_index: int) -> None:
        """Take what the next stage sends back, where it is on this rank, too."""
        self._values[mb_index] |= _own(self._gets, next_stage_bwd_outputs)

    def _note(self, kind: str, microbatch: int | None = None) -> None:
        self._asked.append(Action(0, kind, self.stage_index, microbatch).token)

    def _compute(self, work: Work, microbatch: int) -> None:
        if (work, microbatch) in self._done:
            raise CaptureError(f"stage {self.stage_index} is to run {work} of microbatch {microbatch} twice")
        self._done.add((work, microbatch))
        for value, tensor in self._run(self.stage_index, work, microbatch, lambda value: self._taken(value, microbatch)):
            if value.role == "loss":
                self.losses[microbatch] = tensor
            elif value.role == "unreduced":
                self._made[microbatch][value.fqn] = tensor
            else:
                self._values[microbatch][value.fqn] = tensor

    def _taken(self, value: Value, microbatch: int) -> Any:
        if value.role == "whole":
            assert self._whole is not None
            return self._whole[value.fqn]
        if value.role in ("crossing", "batch"):
            return self._value(value.fqn, microbatch)
        return self._kept[value.key]

    def _value(self, name: str, microbatch: int) -> Any:
        if name in self._values[microbatch]:
            return self._values[microbatch][name]
        if self.is_first and name in self._rows[microbatch]:
            return self._rows[microbatch][name]
        raise CaptureError(f"stage {self.stage_index} reads {name} of microbatch {microbatch}, which it has not received")

    def _named(self, microbatch: int, flow: Sequence[Crossing]) -> tuple[Any, ...]:
        return tuple(self._value(one.name, microbatch) for one in flow)

    def _sending(self, direction: str, microbatch: int, flow: Sequence[Crossing], stage: int) -> list[Any]:
        self._note(f"SEND_{direction[0].upper()}", microbatch)
        tensors, of = self._named(microbatch, flow), Transfer("send", direction, self.stage_index, microbatch)
        return [self.sent(wire(tensor, one), stage, of) for tensor, one in zip(tensors, flow, strict=True) if one.bytes]

    def _receiving(self, direction: str, microbatch: int, flow: Sequence[Crossing], stage: int) -> list[Any]:
        self._note(f"RECV_{direction[0].upper()}", microbatch)
        launches, of = [], Transfer("receive", direction, self.stage_index, microbatch)
        for one in flow:
            # The receiver makes the memory in the strides that were traced, gaps included, and receives into its bytes. A value
            # without elements is not sent at all.
            memory = torch.empty(_span(one), dtype=one.dtype, device=self.device)
            self._values[microbatch][one.name] = memory.as_strided(one.shape, one.strides)
            if one.bytes:
                launches.append(self.received(memory.view(torch.uint8), stage, of))
        return launches


def _around(flows: Sequence[tuple[Crossing, ...]], index: int) -> tuple[tuple[Crossing, ...], tuple[Crossing, ...]]:
    """What crosses the cut before the stage ``index``, and what crosses the cut behind it."""
    return flows[index - 1] if index else (), flows[index] if index < len(flows) else ()


def _own(flow: Sequence[Crossing], values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """``values`` with memory of their own, as if they had been received."""
    found = {}
    for one, value in zip(flow, values, strict=True):
        memory = wire(value, one).clone().view(one.dtype) if one.bytes else torch.empty(0, dtype=one.dtype, device=value.device)
        found[one.name] = memory.as_strided(one.shape, one.strides)
    return found


# On the wire is the memory of a tensor as it lies: a copy in another layout would change the order in which kernels sum.


def wire(tensor: torch.Tensor, said: Crossing) -> torch.Tensor:
    """The bytes of ``tensor`` from its first to its last element: a contiguous view. Raises CaptureError for another layout."""
    pairs = zip(tensor.shape, tensor.stride(), said.strides, strict=False)
    # The stride of a dimension of size 1 moves nothing, and may be any number.
    other = any(size > 1 and stride != traced for size, stride, traced in pairs)
    if said.bytes and (other or (tuple(tensor.shape), tensor.dtype) != (said.shape, said.dtype)):
        raise CaptureError(
            f"{said.name}, which stage {said.stage} makes, was traced as {list(said.shape)} with strides {list(said.strides)} "
            f"in {said.dtype}, but when it is sent it is {list(tensor.shape)} with strides {list(tensor.stride())} in "
            f"{tensor.dtype}"
        )
    return tensor.detach().as_strided((_span(said),), (1,)).view(torch.uint8)


def _span(one: Crossing) -> int:
    """How many elements the memory of ``one`` has from its first to its last element, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(one.shape, one.strides, strict=True)) if one.bytes else 0
