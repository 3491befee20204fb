"""A trainer's own step as the reference: held to it bit for bit, and one sentence for a trainer that is none."""

from __future__ import annotations

import pytest

from suites.eager.eager_net import HEAD, Run


def text(name: str) -> str:
    """The plan whose step is to be that of the trainer of this name."""
    return f"""{HEAD}
[optimizer]
factory = "torch.optim:AdamW"
args = {{ lr = 0.03125 }}
[eager]
factory = "suites.eager.own_trainers:{name}"
"""


def test_a_trainer_whose_step_it_is_is_green_also_where_it_puts_another_class_in_the_models_place(run: Run) -> None:
    verdict = run(text("OtherClass"))
    assert verdict, verdict
    assert "are those of the trainer suites.eager.own_trainers:OtherClass bit for bit on 2 ranks in 3 steps" in verdict.summary


def test_another_step_is_red_and_led_to_its_place(run: Run) -> None:
    verdict = run(text("AnotherLoss"))
    assert verdict.summary == "the bucketed step is not shown to be that of the trainer suites.eager.own_trainers:AnotherLoss"
    assert verdict.lines[0].startswith("step 0, rank 0: loss: 1 of 1 elements differ")
    assert verdict.lines[-1].startswith("first module whose output differs: the loss (aten.mul.Tensor)")


NOT_ONE = {
    "OtherNames": "the trainer's model has no parameter head.weight; it has embed.weight, layers.0.norm.weight, ",
    "OtherShapes": "the trainer's parameter head.weight is float32 (12, 8), where the plan's is float32 (16, 8)",
    "Raises": "it raised ValueError: no such batch",
    "nothing": "[eager] factory gave a Linear without model, optimizers, backward, update",
}


@pytest.mark.parametrize("name", NOT_ONE)
def test_what_is_no_such_trainer_is_one_sentence(name: str, run: Run) -> None:
    verdict = run(text(name))
    assert verdict.outcome == "failed"
    (line,) = verdict.lines
    assert line.startswith(f"the trainer suites.eager.own_trainers:{name}: {NOT_ONE[name]}")
