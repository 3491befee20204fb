"""The loss of a step: the plan's own or the model's, and what is no loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.hints import some

if TYPE_CHECKING:
    from pytest_fxbucket.capture.split_batch import Split


def own_loss(output: Any, batch: Any) -> Any:
    """The loss of a plan that names none: ``loss`` in what the model gives, the one scalar of a tuple, or the output itself."""
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if hasattr(output, "loss"):
        return output.loss
    if isinstance(output, (tuple, list)) and len(scalars := _scalars(output)) == 1:
        return scalars[0]
    return output


def _scalars(output: Sequence[Any]) -> list[torch.Tensor]:
    """Tensors without dimensions that have a gradient."""
    return [item for item in output if isinstance(item, torch.Tensor) and item.dim() == 0 and item.requires_grad]


def refuse_unread(function: Callable[[Any, Any], Any], split: Split, batch: Any) -> None:
    """Raise :class:`CaptureError` for a ``batch`` of which the model leaves something, and a plan without a loss to read it."""
    if function is own_loss and split.has_targets:
        left = split.targets(batch)
        what = f"{some(list(map(str, left)))} of the batch" if isinstance(left, dict) else "a part of the batch"
        raise CaptureError(
            f"the model does not take {what}, and there is no [model] loss to read it; name a callable(output, targets), "
            "or leave it out of the batch"
        )


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
        return _no_own_loss(output, loss, what)
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__qualname__)
    use = "take its mean() or sum()" if is_tensor else "return a tensor without dimensions"
    return f"the loss must be a scalar tensor, but [model] loss {module}:{name} gave {what}; {use}"


def _no_own_loss(output: Any, loss: Any, what: str) -> str:
    if loss is None:
        return "the model's output.loss is None; give the batch what it makes a loss of, as labels, or name a [model] loss"
    if loss is not output:
        return f"the model's output.loss is {what}; name a [model] loss that makes a scalar of it"
    if isinstance(output, Mapping):
        what = f"a {type(output).__name__} of {some(list(map(str, output)))}, and no loss in it"
    elif isinstance(output, (tuple, list)):
        what = f"a {type(output).__name__} of {len(output)}, of which {len(_scalars(output))} are losses"
    return f"the model's output is {what}; name a [model] loss that makes a scalar of it"
