"""What parts of a model take on this machine, forward and backward, measured on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch

from pytest_fxbucket.compat import pytree, tracing
from pytest_fxbucket.errors import StageError
from pytest_fxbucket.pipeline.split import split_forward
from pytest_fxbucket.pipeline.stages import Stage, Stages
from pytest_fxbucket.pipeline.trace import Forward

RUNS = 5
"""That are measured, behind one that is not."""


def seconds_of_parts(
    trace: Callable[[], Forward],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    cuts: Sequence[str],
    clock: Callable[[], float] = perf_counter,
) -> list[float]:
    """Seconds of forward and backward of each part between ``cuts``, the median of :data:`RUNS` runs.

    ``trace`` gives the forward anew, of a call with ``args`` and ``kwargs``. Buffers and random numbers are afterwards as they
    were, and no parameter gets a gradient. ``clock`` gives seconds. Raises :class:`StageError` for a model without values, or
    that cannot be cut at all of ``cuts``.
    """
    forward = trace()
    if bare := [fqn for fqn, one in (forward.parameters | forward.buffers).items() if one.is_meta or tracing.is_fake(one)]:
        raise StageError(f"seconds cannot be measured: {bare[0]} has no values; balance by flops, or measure a smaller model")
    try:
        stages = split_forward(forward, cuts)
    except StageError as error:
        raise StageError(f"seconds of modules cannot be measured one by one: {error}; balance by flops") from error
    with _left_as_it_is(forward):
        runs = [_run(stages, stages.batch(*args, **kwargs), clock) for _ in range(RUNS + 1)][1:]
    return [median(one) for one in zip(*runs, strict=True)]


def _run(stages: Stages, batch: tuple[torch.Tensor, ...], clock: Callable[[], float]) -> list[float]:
    """One run: seconds of each stage, its backward with what comes back from the next."""
    taken, values = [0.0] * len(stages), batch
    ran: list[tuple[Stage, tuple[torch.Tensor, ...], list[torch.Tensor]]] = []
    for number, stage in enumerate(stages):
        received = tuple(one.detach().requires_grad_(one.requires_grad) for one in values)
        with torch.enable_grad():
            begin = _now(clock, received)
            given = stage(*received)
            taken[number] = _now(clock, received) - begin
        values = tuple(one for one in pytree.tree_leaves(given) if isinstance(one, torch.Tensor))
        ran.append((stage, received, list(values)))
    back: list[torch.Tensor | None] = [torch.ones_like(one) if one.requires_grad else None for one in values]
    for number, (stage, received, made) in reversed(list(enumerate(ran))):
        wanted = [one for one in (*received, *stage.parameters()) if one.requires_grad]
        pairs = [(one, grad) for one, grad in zip(made, back, strict=True) if one.requires_grad and grad is not None]
        back = [None] * len(received)
        if not pairs or not wanted:
            continue
        begin = _now(clock, received)
        grads = torch.autograd.grad([one for one, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True)
        taken[number] += _now(clock, received) - begin
        by_input = {id(one): grad for one, grad in zip(wanted, grads, strict=True)}
        back = [by_input.get(id(one)) for one in received]
    return taken


def _now(clock: Callable[[], float], tensors: Sequence[torch.Tensor]) -> float:
    """The time at which all that was launched on the devices of ``tensors`` is done."""
    for device in sorted({one.device for one in tensors if one.device.type == "cuda"}, key=str):
        torch.cuda.synchronize(device)
    return clock()


@contextmanager
def _left_as_it_is(forward: Forward) -> Iterator[None]:
    kept = [(buffer, buffer.detach().clone()) for buffer in forward.buffers.values()]
    devices = sorted({one.device.index or 0 for one in forward.parameters.values() if one.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, was in kept:
                buffer.copy_(was)
