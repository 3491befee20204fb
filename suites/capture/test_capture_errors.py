"""What cannot be captured: one sentence that leads a person to their own line, module or key."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import capture_models
import pytest
import torch
from steps import captured, plan_of

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.errors import CaptureError, FxbucketError, PlanError
from pytest_fxbucket.step.mesh import shard_mesh


def sentence(factory: str = "residual", **rest: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        captured(factory, **rest)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def line_of(function: Callable[..., Any], text: str) -> str:
    """``file:line in function`` of the line of ``function`` that begins with ``text``."""
    lines, first = inspect.getsourcelines(function)
    number = next(i for i, line in enumerate(lines) if line.strip().startswith(text))
    path = Path(inspect.getsourcefile(function) or "").relative_to(Path.cwd())
    return f"{path.as_posix()}:{first + number} in {function.__name__}"


def test_a_factory_that_raises_is_told_at_its_own_line() -> None:
    at = line_of(capture_models.raises, "raise")
    assert sentence("raises") == f"[model] factory capture_models:raises failed at {at}: ValueError: no such width"


def test_a_factory_with_other_arguments_is_told_with_the_one_that_is_too_much() -> None:
    assert "[model] factory capture_models:residual failed: TypeError" in sentence(args={"depth": 3})
    assert "'depth'" in sentence(args={"depth": 3})


def test_a_factory_that_gives_no_module_is_told_with_what_it_gave() -> None:
    assert sentence("no_module") == (
        "[model] factory capture_models:no_module gave a value of type int, expected a torch.nn.Module"
    )


def test_a_forward_that_raises_is_told_with_module_and_line() -> None:
    at = line_of(capture_models.RaisingLinear.forward, "raise")
    assert sentence("raises_in_forward") == f"tracing module 1 failed at {at}: KeyError: 'lost'"


def test_an_error_in_torchs_own_module_is_told_with_the_modules_name() -> None:
    assert sentence("wrong_width").startswith("tracing module 1 failed: RuntimeError: a and b must have same reduction dim")


def test_torchs_log_prints_no_traceback_beside_the_sentence(caplog: pytest.LogCaptureFixture) -> None:
    sentence("wrong_width")
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_pytest_hears_nothing_of_torchs_structured_log(caplog: pytest.LogCaptureFixture) -> None:
    heard = logging.getLogger("torch.__trace")
    heard.addHandler(caplog.handler)  # as pytest does with loggers that do not propagate
    try:
        sentence("wrong_width")
    finally:
        heard.removeHandler(caplog.handler)
    assert caplog.records == []
    assert not heard.disabled


def test_an_error_after_a_caught_one_is_told_with_its_own_module() -> None:
    assert sentence("catches_then_raises").startswith("tracing the root module failed")


def test_a_forward_that_asks_for_a_value_is_told_with_module_and_line() -> None:
    at = line_of(capture_models.Item.forward, "return")
    assert sentence("asks_a_value") == (
        f"tracing module 1 failed at {at}: it asks for the value of a tensor (item(), bool(), tolist(), numpy()), "
        "which does not exist while tracing; keep it a tensor (torch.where instead of if), or leave it out of the step; "
        '[[override]] module = ["1"] calls it as it is when the step runs'
    )


def test_numpy_is_told_as_what_asks_for_a_value() -> None:
    at = line_of(capture_models.Numpy.forward, "return")
    said = sentence("leaves_torch")
    assert said.startswith(
        f"tracing module 1 failed at {at}: it asks for the value of a tensor (item(), bool(), tolist(), numpy())"
    )


def test_a_shape_that_depends_on_values_is_told() -> None:
    assert "the shape that aten.nonzero.default gives depends on values" in (said := sentence("selects_by_value"))
    assert said.endswith('or leave it out of the step; [[override]] module = ["1"] calls it as it is when the step runs')


def test_a_buffer_that_is_new_in_forward_is_told_with_where_it_belongs() -> None:
    assert sentence("adds_a_buffer") == (
        "buffer 1.late is new in forward, so it is no input of the step; register it in __init__"
    )


def test_a_parameter_without_dimensions_is_told_to_whom_has_a_mode_of_his_own() -> None:
    assert sentence("has_a_scalar", mode="capture_models:last_dimension") == (
        "parameter scale has no dimension, and mode capture_models:last_dimension may not expect that; give it the shape (1,)"
    )


def test_a_batch_that_is_no_batch_is_told() -> None:
    assert sentence(batch="a_number") == (
        "[model] batch capture_models:a_number gave a value of type int, expected a tuple or a dict of inputs"
    )


def test_a_batch_that_raises_is_told_at_its_own_line() -> None:
    at = line_of(capture_models.raising_batch, "raise")
    assert (
        sentence(batch="raising_batch") == f"[model] batch capture_models:raising_batch failed at {at}: OSError: no data here"
    )


def test_batches_of_other_shapes_on_other_ranks_are_told() -> None:
    assert sentence(batch="growing_batch") == (
        "[model] batch capture_models:growing_batch gave [0] (4, 8) torch.float32 for rank 0, step 0, but "
        "[0] (7, 8) torch.float32 for rank 3, step 1; only the values of its tensors may change, since one graph serves all"
    )


def test_a_number_that_changes_with_the_step_is_told_and_not_traced_in() -> None:
    assert "gave ['step'] 0 for rank 0, step 0, but ['step'] 1 for rank 3, step 1" in sentence(batch="numbered_batch")


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            "vector_loss",
            "the loss must be a scalar tensor, but [model] loss capture_models:vector_loss gave a tensor of shape (8,); "
            "take its mean() or sum()",
        ),
        (
            "number_loss",
            "the loss must be a scalar tensor, but [model] loss capture_models:number_loss gave a value of type float; "
            "return a tensor without dimensions",
        ),
        ("loss_without_parameters", "the loss does not depend on any trainable parameter, so there is no step to check"),
    ],
)
def test_a_loss_that_gives_no_gradients_is_told(loss: str, said: str) -> None:
    assert sentence(loss=loss) == said


def test_a_loss_that_raises_is_not_taken_for_the_model() -> None:
    at = line_of(capture_models.raising_loss, "raise")
    assert sentence(loss="raising_loss") == f"tracing the loss failed at {at}: IndexError: no labels"


def test_a_loss_left_out_that_the_output_does_not_have_is_told() -> None:
    plan = plan_of("residual")
    assert plan.model is not None
    with pytest.raises(CaptureError) as caught:
        capture_plan(replace(plan, model=replace(plan.model, loss=None)), shard_mesh(4), 0)
    assert str(caught.value) == (
        "the model's output is a tensor of shape (4, 8); name a [model] loss that makes a scalar of it"
    )


def test_a_process_group_that_is_up_already_is_told_and_left_alone() -> None:
    with fake_world(0, 2):
        assert sentence().startswith("a default process group is up in this process")
        assert torch.distributed.get_world_size() == 2


@pytest.mark.parametrize("what", ["factory", "batch", "loss"])
def test_what_cannot_be_imported_is_told_with_its_key(what: str) -> None:
    rest = {"factory": "residual"} | {what: "residul"}
    with pytest.raises(FxbucketError) as caught:
        captured(**rest)
    assert isinstance(caught.value, PlanError)
    assert str(caught.value) == (
        f'plan.toml: [model] {what}: module "capture_models" has no "residul"; did you mean "residual"?'
    )
