"""Operators of overridden modules: ``anchor_*``, which cannot run and must not be left over, and ``call_*``, the real module's.

``module`` is the key of the module, ``call`` the text of :class:`pytest_fxbucket.capture.override.call.Call`, ``held`` its
parameters, buffers and state, ``inputs`` the tensors that it is called with. ``grads`` are of the results ``of``; gradients
come for the numbers ``wanted`` of held and inputs. ``number`` counts an anchor's calls in one trace. Behind its results
``call_forward`` gives their digest where gradients are asked for; ``call_backward`` takes it as ``digest``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pytest_fxbucket.capture.override.call import call_of
from pytest_fxbucket.capture.override.calling import called_backward, called_forward
from pytest_fxbucket.capture.override.digest import fake_digest
from pytest_fxbucket.capture.override.promise import promised

Tensors = Sequence[torch.Tensor]
_GIVEN = "str module, str call, Tensor[] held, Tensor[] inputs"
_BACK = f"{_GIVEN}, Tensor[] grads, int[] of, int[] wanted"

_library: Any = torch.library.Library("fxbucket", "FRAGMENT")  # type: ignore[no-untyped-call]  # untyped in torch


def _fake_forward(module: str, call: str, held: Tensors, inputs: Tensors, number: int = 0) -> list[torch.Tensor]:
    device = next((tensor.device for tensor in (*inputs, *held)), torch.device("cpu"))
    return [
        torch.empty_strided(one.shape, one.strides, dtype=one.dtype, device=device)
        for one in map(promised, call_of(call).promise)
    ]


def _fake_called_forward(module: str, call: str, held: Tensors, inputs: Tensors) -> list[torch.Tensor]:
    results = _fake_forward(module, call, held, inputs)
    return [*results, *([fake_digest(results)] if call_of(call).asks else [])]


def _fake_backward(
    module: str,
    call: str,
    held: Tensors,
    inputs: Tensors,
    grads: Tensors,
    of: Sequence[int],
    wanted: Sequence[int],
    number: int = 0,
    digest: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    tensors = [*held, *inputs]
    return [torch.empty_like(tensors[i]) for i in wanted]


def _define(name: str, schema: str, fake: Any, real: Any = None) -> torch._ops.OpOverload:
    _library.define(f"{name}({schema}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"fxbucket::{name}", fake, lib=_library)
    if real is not None:
        _library.impl(name, real, "CompositeExplicitAutograd")
    op: torch._ops.OpOverload = getattr(torch.ops.fxbucket, name).default
    return op


ANCHOR_FORWARD = _define("anchor_forward", f"{_GIVEN}, int number", _fake_forward)
ANCHOR_BACKWARD = _define("anchor_backward", f"{_BACK}, int number", _fake_backward)
CALL_FORWARD = _define("call_forward", _GIVEN, _fake_called_forward, called_forward)
CALL_BACKWARD = _define("call_backward", f"{_BACK}, Tensor? digest=None", _fake_backward, called_backward)
