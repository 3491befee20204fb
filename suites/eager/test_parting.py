"""Whether a model gives of parts of sequences, or of some experts, what it gives of all: told, or said why it cannot be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pytest_fxbucket.eager.parting import PartError, Parting, parting_of_experts, parting_of_sequences


class FirstOfTwo(ProcessGroup):
    """A place in a group, for models that do not attend."""

    def __init__(self) -> None:
        super().__init__(0, 2)


def raising(x: Tensor) -> Tensor:
    raise ValueError("no\n  float32 here")


WHOLE = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0))
ASKED: dict[str, tuple[Callable[[Tensor], Tensor], Parting]] = {
    "alike": (lambda x: x, Parting()),
    "half": (
        lambda x: x.bfloat16().float(),
        Parting(unasked="the model computes in 16 bits by itself, whose rounding would hide it"),
    ),
    "alone": (lambda x: x.sum(), Parting(unasked="no output of the model has the sequence in dimension 1")),
    "square": (
        lambda x: x[0] @ x[0].T,
        Parting(unasked="no output of the model has the sequence in dimension 1"),
    ),
    "infinite": (lambda x: x / 0, Parting(unasked="of whole sequences the model gives numbers that are not finite")),
    "draws": (
        lambda x: nn.functional.dropout(x, 0.5, training=True),
        Parting(unasked="in eval() the model draws random numbers, and of a part it draws others"),
    ),
    "raises": (raising, Parting(unasked="in float32 the model raises ValueError: no float32 here")),
    "nan": (
        lambda x: x if x.shape[1] == 8 else x.where(x != x[0, 2, 0], torch.nan),
        Parting(
            "of a part of the sequence the model gives other values than of the whole, not finite ones, first at place 2 of "
            "a part; if it counts positions by itself, let the batch give them: cp cuts them as it cuts tokens"
        ),
    ),
}


@pytest.mark.parametrize(("model", "says"), ASKED.values(), ids=ASKED.keys())
def test_what_cannot_be_told_of_parts_and_wholes_is_said(model: Callable[[Tensor], Tensor], says: Parting) -> None:
    assert parting_of_sequences(model, WHOLE, WHOLE[:, :4], FirstOfTwo()) == says


def wants_eight(x: Tensor) -> Tensor:
    return x if x.shape[1] == 8 else raising(x)


def test_what_raises_of_a_part_alone_is_no_question_left_open() -> None:
    says = "takes whole sequences but raises ValueError of a part at suites/eager/.*: no float32 here; let it take sequences of"
    with pytest.raises(PartError, match=says):
        parting_of_sequences(wants_eight, WHOLE, WHOLE[:, :4], FirstOfTwo())


class Experts(nn.Module):
    """``made`` of tokens (experts, capacity, 3), each scaled by its expert's number."""

    def __init__(self, made: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.made, self.scale = made, nn.Parameter(torch.arange(1.0, 7.0).view(6, 1, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.made(tokens, self.scale)


def scaled(tokens: Tensor, scale: Tensor) -> Tensor:
    return tokens * scale


def other_values(by: str, expert: int) -> Parting:
    return Parting(f"of some of its experts e gives other values than of all, {by}, first of expert {expert}; {ALONE}")


ALONE = (
    "with ep it is called on each rank with that rank's experts and the tokens of all ranks for them, so what it computes must "
    "not go by an expert's place, by other experts or by other tokens"
)
OF_EXPERTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Parting]] = {
    "alike": (scaled, Parting()),
    "by place": (
        lambda x, scale: x * scale + 1000 * torch.arange(x.shape[0]).view(-1, 1, 1),
        other_values("by 40.0% of the largest", 2),
    ),
    "the first gives its tokens back": (
        lambda x, scale: torch.cat([x[:1], (x * scale)[1:]]),
        other_values("by 26.7% of the largest", 2),
    ),
    "other experts": (lambda x, scale: x * scale - scale.mean(), other_values("by 15.3% of the largest", 0)),
    "other tokens": (lambda x, scale: x * scale - x.mean(1, keepdim=True), other_values("by 8.0% of the largest", 0)),
    "half": (
        lambda x, scale: (x * scale).bfloat16().float(),
        Parting(unasked="the model computes in 16 bits by itself, whose rounding would hide it"),
    ),
    "draws": (
        lambda x, scale: nn.functional.dropout(x * scale, 0.5, training=True),
        Parting(unasked="in eval() the model draws random numbers, and of a part it draws others"),
    ),
    "infinite": (lambda x, scale: x * scale / 0, Parting(unasked="of all its experts e gives numbers that are not finite")),
    "nan of some": (
        lambda x, scale: x * scale if len(scale) == 6 else x * scale / 0,
        other_values("not finite ones", 0),
    ),
}
TOKENS = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("made", "says"), OF_EXPERTS.values(), ids=OF_EXPERTS.keys())
def test_experts_that_know_of_each_other_are_told(made: Callable[[Tensor, Tensor], Tensor], says: Parting) -> None:
    experts = Experts(made)
    assert parting_of_experts(lambda: experts(TOKENS), {"e": experts}, 3) == says


def test_experts_that_are_given_tokens_by_name_are_asked_too() -> None:
    made, says = OF_EXPERTS["by place"]
    experts = Experts(made)
    assert parting_of_experts(lambda: experts(tokens=TOKENS), {"e": experts}, 3) == says


def test_what_some_experts_raise_alone_is_told_with_its_place() -> None:
    experts = Experts(lambda x, scale: x * scale if len(scale) == 6 else raising(x))
    wrong = parting_of_experts(lambda: experts(TOKENS), {"e": experts}, 2).wrong
    assert wrong.startswith("of some of its experts e raises ValueError at suites/eager/test_parting.py:")
    assert wrong.endswith(f": no float32 here; {ALONE}")


def test_experts_that_are_not_reached_are_left_open() -> None:
    experts, idle = Experts(scaled), Experts(scaled)
    both = {"e": experts, "idle": idle}
    assert parting_of_experts(lambda: experts(TOKENS), both, 2) == Parting(unasked="in eval() the model does not call idle")
    in_float32 = "in float32 the model raises ValueError: no float32 here"
    assert parting_of_experts(lambda: raising(TOKENS), both, 2) == Parting(unasked=in_float32)
