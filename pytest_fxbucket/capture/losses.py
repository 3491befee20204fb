"""The loss of a step: the plan's own or the model's, and what is no loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_fxbucket.errors import CaptureError


def own_loss(output: Any, batch: Any) -> torch.Tensor:
    """``output.loss``, or the output itself: the loss of a plan that names none."""
    loss: torch.Tensor = getattr(output, "loss", output)
    return loss


def refuse_other_loss(function: Callable[[Any, Any], Any], output: Any, loss: Any) -> None:
    """A loss is a scalar tensor that depends on a trainable parameter; ``function`` made it of ``output``."""
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        raise CaptureError(_no_scalar(function, output, loss))
    if not loss.requires_grad:
        raise CaptureError("the loss does not depend on any trainable parameter, so there is no step to check")


def _no_scalar(function: Callable[[Any, Any], Any], output: Any, loss: Any) -> str:
    is_tensor = isinstance(loss, torch.Tensor)
    what = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else f"a value of type {type(loss).__name__}"
    if function is own_loss:
        which = "output.loss" if hasattr(output, "loss") else "output"
        return f"the model's {which} is {what}; name a [model] loss that makes a scalar of it"
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__qualname__)
    use = "take its mean() or sum()" if is_tensor else "return a tensor without dimensions"
    return f"the loss must be a scalar tensor, but [model] loss {module}:{name} gave {what}; {use}"
