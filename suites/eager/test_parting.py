"""Whether a model gives of parts of sequences what it gives of wholes: told, or said why it cannot be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pytest_fxbucket.eager.context_parallel import PartError, SequenceParting, parting_of


class FirstOfTwo(ProcessGroup):
    """A place in a group, for models that do not attend."""

    def __init__(self) -> None:
        super().__init__(0, 2)


def raising(x: Tensor) -> Tensor:
    raise ValueError("no\n  float32 here")


WHOLE = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0))
ASKED: dict[str, tuple[Callable[[Tensor], Tensor], SequenceParting]] = {
    "alike": (lambda x: x, SequenceParting()),
    "half": (
        lambda x: x.bfloat16().float(),
        SequenceParting(unasked="the model computes in 16 bits by itself, whose rounding would hide it"),
    ),
    "alone": (lambda x: x.sum(), SequenceParting(unasked="no output of the model has the sequence in dimension 1")),
    "square": (
        lambda x: x[0] @ x[0].T,
        SequenceParting(unasked="no output of the model has the sequence in dimension 1"),
    ),
    "infinite": (lambda x: x / 0, SequenceParting(unasked="of whole sequences the model gives numbers that are not finite")),
    "draws": (
        lambda x: nn.functional.dropout(x, 0.5, training=True),
        SequenceParting(unasked="in eval() the model draws random numbers, and of a part it draws others"),
    ),
    "raises": (raising, SequenceParting(unasked="in float32 the model raises ValueError: no float32 here")),
    "nan": (
        lambda x: x if x.shape[1] == 8 else x.where(x != x[0, 2, 0], torch.nan),
        SequenceParting(
            "of a part of the sequence the model gives other values than of the whole, not finite ones, first at place 2 of "
            "a part; if it counts positions by itself, let the batch give them: cp cuts them as it cuts tokens"
        ),
    ),
}


@pytest.mark.parametrize(("model", "says"), ASKED.values(), ids=ASKED.keys())
def test_what_cannot_be_told_of_parts_and_wholes_is_said(model: Callable[[Tensor], Tensor], says: SequenceParting) -> None:
    assert parting_of(model, WHOLE, WHOLE[:, :4], FirstOfTwo()) == says


def wants_eight(x: Tensor) -> Tensor:
    return x if x.shape[1] == 8 else raising(x)


def test_what_raises_of_a_part_alone_is_no_question_left_open() -> None:
    says = "takes whole sequences but raises ValueError of a part at suites/eager/.*: no float32 here; let it take sequences of"
    with pytest.raises(PartError, match=says):
        parting_of(wants_eight, WHOLE, WHOLE[:, :4], FirstOfTwo())
