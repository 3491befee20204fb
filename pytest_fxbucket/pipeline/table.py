"""The table of a schedule: what every rank of a pipeline does, in its order, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

FORWARD, BACKWARD, INPUT_GRADS, WEIGHT_GRADS = "F", "B", "I", "W"
OVERLAPPED = "OVERLAP_F_B"
SENDS, RECEIVES = ("SEND_F", "SEND_B"), ("RECV_F", "RECV_B")
TRANSFERS = SENDS + RECEIVES
GATHERS = ("UNSHARD", "RESHARD")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does, in torch's words."""

    rank: int
    kind: str
    """``F``, ``B`` (whole backward), ``I`` and ``W`` (gradients of inputs, of weights), ``SEND_F``, ``RECV_F``, ``SEND_B``,
    ``RECV_B``, ``UNSHARD``, ``RESHARD``, ``REDUCE_GRAD``, or ``OVERLAP_F_B``, which has ``parts``."""
    stage: int
    """Whose; of overlapped ones that of the first part."""
    microbatch: int | None = None
    """None for what is done once for all of them."""
    parts: tuple[Action, ...] = ()
    batch: int | None = None
    """Number, on its rank, of the ``batch_isend_irecv`` that a send or receive is launched in; None if it is launched alone."""

    @property
    def token(self) -> str:
        """As torch writes it: ``0F3``, ``1SEND_B0``, ``2UNSHARD``; overlapped ones in parentheses."""
        if self.parts:
            return f"({' '.join(part.token for part in self.parts)})"
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    def __str__(self) -> str:
        if self.parts:
            return " with ".join(map(str, self.parts))
        return f"{self.kind} of stage {self.stage}" + ("" if self.microbatch is None else f", microbatch {self.microbatch}")


@dataclass(frozen=True, slots=True)
class Table:
    """What all ranks do."""

    schedule: str
    stages: int
    pp: int
    microbatches: int
    owners: tuple[int, ...]
    """The rank of each stage."""
    ranks: tuple[tuple[Action, ...], ...]
    """Actions of each rank, in its order."""

    def peer(self, transfer: Action) -> int | None:
        """The rank that a send goes to, or a receive is from; None where no stage is."""
        other = transfer.stage + (1 if transfer.kind in ("SEND_F", "RECV_B") else -1)
        return self.owners[other] if 0 <= other < self.stages else None

    def partner(self, transfer: Action) -> tuple[str, int, int | None]:
        """Kind, stage and microbatch of the receive of a send, or of the send of a receive."""
        way = transfer.kind[-1]
        forward = 1 if way == "F" else -1
        if transfer.kind in SENDS:
            return f"RECV_{way}", transfer.stage + forward, transfer.microbatch
        return f"SEND_{way}", transfer.stage - forward, transfer.microbatch


def leaves(actions: tuple[Action, ...]) -> Iterator[Action]:
    """``actions``, with the parts of overlapped ones in their place."""
    for action in actions:
        yield from action.parts or (action,)
