"""The real module, called when a graph runs: its own forward, and backward by calling it again.

What backward needs it computes again from the same tensors, as activation checkpointing does (T. Chen et al., arXiv
1604.06174). So a call must not draw, write or remember anything. What can be seen in forward is refused there; the rest
in backward, which gets a digest of what forward gave and compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from pytest_fxbucket.capture.override.call import Call, call_of
from pytest_fxbucket.capture.override.digest import digest_of
from pytest_fxbucket.capture.override.first_look import is_new, refuse_remembering, refuse_strangers
from pytest_fxbucket.capture.override.live import fqn_of, holding, module_at, names_of
from pytest_fxbucket.capture.override.promise import keeps, promise_text
from pytest_fxbucket.capture.override.structure import rebuilt, shown, written
from pytest_fxbucket.errors import CaptureError

Tensors = Sequence[torch.Tensor]


def called_forward(module: str, call: str, held: Tensors, inputs: Tensors) -> list[torch.Tensor]:
    """What the module gives, without an autograd graph; behind it its digest, where gradients are asked for.

    Raises :class:`CaptureError` for a call that a graph cannot make.
    """
    made, tensors = call_of(call), [*held, *inputs]
    real, drawn = module_at(module), torch.get_rng_state()
    first = is_new(real)
    twins = _twins(tensors, made.asks, safe=first)
    with refuse_remembering(module, real):
        results = _run(module, made, twins, len(held))
        if first:
            refuse_strangers(module, results, twins)
    if not torch.equal(drawn, torch.get_rng_state()):
        raise CaptureError(
            f"module {fqn_of(module)} draws random numbers, which backward, where it is called again, would draw anew; set its "
            "dropout to 0, or override it by a sub-graph"
        )
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    given = [
        result.detach().clone() if result.untyped_storage().data_ptr() in storages else result.detach() for result in results
    ]
    return [*given, digest_of(given)] if made.asks else given


def called_backward(
    module: str,
    call: str,
    held: Tensors,
    inputs: Tensors,
    grads: Tensors,
    of: Sequence[int],
    wanted: Sequence[int],
    digest: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Gradients of ``wanted`` (numbers of ``held``, then ``inputs``), by those of the results ``of``.

    ``digest`` is of what forward gave, None where the graph has no forward. Raises :class:`CaptureError` for other results now.
    """
    made = call_of(call)
    twins = _twins([*held, *inputs], made.asks)
    state = torch.get_rng_state()
    results = _run(module, made, twins, len(held))
    torch.set_rng_state(state)
    if digest is not None and not torch.equal(digest, digest_of(results)):
        raise CaptureError(
            f"module {fqn_of(module)} gives other values when backward calls it again than it gave in forward: it draws random "
            "numbers, or keeps something from call to call; give it what it draws or keeps as an input, or override it by a "
            "sub-graph with state"
        )
    pairs = [(results[i], grad) for i, grad in zip(of, grads, strict=True) if results[i].requires_grad]
    asked = [twins[i] for i in wanted]
    if not pairs:
        found: Sequence[torch.Tensor | None] = [None] * len(asked)
    else:
        with torch.enable_grad():
            outputs, given = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, asked, given, allow_unused=True)
    if made.unused == "refused":
        _refuse_unused(module, made, [i for i, grad in zip(wanted, found, strict=True) if grad is None])
    return [
        _laid_out_as(twin, torch.zeros_like(twin) if grad is None else grad) for twin, grad in zip(asked, found, strict=True)
    ]


def _twins(tensors: Tensors, asks: Sequence[int], *, safe: bool = False) -> list[torch.Tensor]:
    """The same memory, as leaves of an autograd graph of its own; ``safe``: what nobody asks a gradient for in memory of its
    own."""
    return [
        tensor.detach().requires_grad_() if i in asks else tensor.detach().clone() if safe else tensor.detach()
        for i, tensor in enumerate(tensors)
    ]


def _run(key: str, made: Call, twins: Tensors, held: int) -> list[torch.Tensor]:
    module = module_at(key)
    if list(made.held) != names_of(module):
        raise CaptureError(
            f"module {fqn_of(key)} has other parameters and buffers than when the step was traced: {_some(names_of(module))}, "
            f"and it had {_some(made.held)}"
        )
    args, kwargs = rebuilt(made.given, twins[held:])
    versions = [twin._version for twin in twins]
    around: AbstractContextManager[Any] = torch.enable_grad() if made.asks else torch.no_grad()
    with around, holding(module, dict(zip(made.held, twins[:held], strict=True))), _naming_writes(key):
        output = module.forward(*args, **kwargs)
    for i, (twin, version) in enumerate(zip(twins, versions, strict=True)):
        if twin._version != version:
            raise CaptureError(_writes(key, made.held[i] if i < held else f"its input {i - held}"))
    results: list[torch.Tensor] = []
    gives = written(output, results, f"module {fqn_of(key)} gives")
    if gives != made.gives:
        raise CaptureError(
            f"module {fqn_of(key)} gives a {shown(gives)}, where {shown(made.gives)} was promised when the step was traced; "
            "let `output` of its override give what a call gives"
        )
    for i, (result, promise) in enumerate(zip(results, made.promise, strict=True)):
        if not keeps(result, promise):
            raise CaptureError(
                f"module {fqn_of(key)} gives {promise_text(result)} as result {i}, where {promise} was promised when the step "
                "was traced; let `output` of its override give what a call gives"
            )
    return results


@contextmanager
def _naming_writes(key: str) -> Iterator[None]:
    """torch itself refuses writes to what gradients are asked for."""
    try:
        yield
    except RuntimeError as error:
        if "a leaf Variable that requires grad" not in str(error):
            raise
        raise CaptureError(_writes(key, "a parameter, or one of its inputs,")) from error


def _writes(key: str, what: str) -> str:
    return (
        f"module {fqn_of(key)} writes {what} in place, which backward, where it is called again, would write once more; give "
        "the new value back, or override it by a sub-graph with state"
    )


def _refuse_unused(key: str, made: Call, missing: Sequence[int]) -> None:
    if missing:
        i = missing[0]
        what = made.held[i] if i < len(made.held) else f"input {i - len(made.held)}"
        raise CaptureError(
            f"{what} of module {fqn_of(key)} has no gradient in this call, where eager would leave .grad as it is and a graph "
            "cannot; let every call use it, an expert without tokens too, or set requires_grad = False"
        )


def _laid_out_as(twin: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """``grad`` with the strides that were promised."""
    like = torch.empty_like(twin, dtype=grad.dtype)
    if grad.stride() == like.stride():
        return grad
    return like.copy_(grad)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"
