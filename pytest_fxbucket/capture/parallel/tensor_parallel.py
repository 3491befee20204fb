"""Linears parted over tp (Megatron-LM, arXiv 1909.08053): by columns of the output, or by rows of what is summed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.capture.backward import with_gradient
from pytest_fxbucket.capture.parallel.sequence_parallel import reduced_out, summed
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.step.mesh import Group
from pytest_fxbucket.words import some

_DIMS = {"colwise": {"weight": 0, "bias": 0}, "rowwise": {"weight": 1}}


def parted_dim(style: str, name: str) -> int | None:
    """Dimension of the parameter ``name`` of a linear that is parted; None if every rank has all of it."""
    return _DIMS[style].get(name)


def parted_forward(fqn: str, module: nn.Linear, style: str, group: Group, in_sequence: bool) -> Callable[..., Any]:
    """What is to be called instead of the forward of ``module``, called ``fqn``: it computes on the part of the weight.

    ``colwise`` takes the whole input and gives its part of the output, ``rowwise`` the reverse. ``in_sequence``: the
    linear lies in a module that gathers the sequence for all its linears at once, and gives a rank's part of the sequence.
    """
    if style == "colwise":
        whole = module.forward
        # The gather of the sequence sums the input's gradient in its own backward.
        if in_sequence:
            return whole
        # Each rank computes with all of the input, so its gradient is the sum over the ranks.
        return lambda x: whole(with_gradient(x, lambda one: one.view_as(one), lambda gradient: summed(gradient, group)))

    def rowwise(x: torch.Tensor) -> torch.Tensor:
        width, part = x.shape[-1], module.weight.shape[1]
        if width == part * group.size:
            raise CaptureError(
                f"tp_plan makes {fqn} rowwise, so its input must be a rank's part, {part} of {width} wide, but it is whole; "
                "make the linears that its input is made by colwise"
            )
        out = (reduced_out if in_sequence else _summed_out)(torch.nn.functional.linear(x, module.weight), group)
        # Added to a part, the bias would be in the sum once for each rank.
        return out if module.bias is None else out + module.bias

    return rowwise


def refuse_unpartable(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Raise :class:`CaptureError` if a module that ``styles`` names is no plain linear."""
    for fqn, style in styles.items():
        module = model.get_submodule(fqn)
        if type(module).forward is not torch.nn.Linear.forward:
            kind = type(module).__name__
            article = "an" if kind[0] in "AEIOU" else "a"
            below = [name for name, one in module.named_modules() if type(one).forward is torch.nn.Linear.forward]
            if below:
                raise CaptureError(
                    f"tp_plan makes {fqn} {style}, but it is {article} {kind}, of which the linears are to be named: "
                    + ", ".join(f'"{fqn}.{name}" = "{style}"' for name in below[:4])
                )
            raise CaptureError(
                f"tp_plan makes {fqn} {style}, but it is {article} {kind}; only modules with the forward of "
                'torch.nn.Linear can be parted, others need mode = "module:callable"'
            )


def tp_hint(parted: Mapping[str, str], ranks: int, error: Exception) -> str:
    """What to say behind ``error``, which a model raised while its linears ``parted`` gave a rank's part; empty: nothing."""
    narrow = [fqn for fqn, style in parted.items() if style == "colwise"]
    if ranks == 1 or not narrow or not isinstance(error, (RuntimeError, ValueError, IndexError)):
        return ""
    outputs = f"the output of {narrow[0]} (colwise) is a rank's part"
    if narrow[1:]:
        outputs = f"the outputs of {some(narrow, 1)} (colwise) are a rank's part"
    return (
        f"under tp = {ranks} {outputs}: let heads follow from the width, as in view(batch, sequence, -1, head_dim), "
        "and make what reads them rowwise"
    )


def _summed_out(part: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of what each rank has a part of; the gradient of every part is that of the sum."""
    return with_gradient(part, lambda one: summed(one, group), lambda gradient: gradient)


Shapes = list[tuple[str, tuple[int, ...]]]


def shapes_of(output: Any) -> Shapes:
    """Path and shape of each tensor of ``output``."""
    leaves = pytree.tree_flatten_with_path(output)[0]
    return [(pytree.keystr(path), tuple(leaf.shape)) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]


def refuse_parts(whole: Shapes, output: Any, colwise: Sequence[str], ranks: int) -> None:
    """Raise :class:`CaptureError` if ``output`` has other shapes than ``whole``, those of the model that is not parted.

    ``colwise`` are the linears whose outputs are a rank's part.
    """
    for (path, expected), (_, shape) in zip(whole, shapes_of(output), strict=False):
        if shape != expected:
            named = f"{colwise[-1]}, colwise in tp_plan," if colwise else "a module of tp_plan"
            what = f"output {path}" if path else "output"
            raise CaptureError(
                f"under tp = {ranks} the model's {what} has the shape {shape}, and {expected} without: a rank's part reaches "
                f"the loss; let what reads the output of {named} be rowwise, or leave it out of tp_plan"
            )
