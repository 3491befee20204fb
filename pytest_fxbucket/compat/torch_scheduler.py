"""torch's automatic overlap scheduler (``torch._inductor.fx_passes.overlap_scheduling``, in torch 2.13), on any install.

An install without a GPU needs two changes. The roofline imports triton even if a caller's own estimate is used, so it is
replaced by 0.0. The memory limits count no memory of the CPU, where fake values live, so they are made to count it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from pytest_fxbucket.compat.tracing import quiet

if TYPE_CHECKING:
    from torch import fx

Milliseconds = Callable[["fx.Node", int | None], float | None]
"""Milliseconds of a node; with a number, of a launch of so many bytes. torch asks for 0 bytes and takes that as the latency."""
_MODULE = "torch._inductor.fx_passes.overlap_scheduling"
_TALKERS = ("torch._inductor.fx_passes.fsdp", "torch._inductor.augmented_graph_helper")
_TRACE = "torch.__trace"
"""torch writes whole graphs to this logger as long as it has a handler, even one that nobody reads."""


@dataclass(frozen=True, slots=True)
class TorchAccount:
    """What the scheduler says of its schedule, before it merges launches into buckets."""

    exposed_ms: float
    peak_before: int
    peak: int
    """Bytes, by the scheduler's own account of what is alive."""


def torch_schedule_overlap(
    gm: fx.GraphModule, milliseconds: Milliseconds, held: Sequence[fx.Node] = (), **keywords: Any
) -> tuple[fx.GraphModule, TorchAccount | None]:
    """torch's ``schedule_overlap_bucketing(gm, custom_runtime_estimation=milliseconds, **keywords)``, and its account.

    ``held`` are inputs that live throughout: torch knows them only by names, so they are renamed ``primals_<number>``; other
    inputs it frees behind their last reader. ``gm`` is changed, even if torch raises, which may be any exception. Process
    groups of the graph must be there.
    """
    from torch._inductor.fx_passes import overlap_scheduling
    from torch._inductor.fx_passes.memory_estimator import MemoryTracker

    for number, node in enumerate(held):
        node._rename(f"primals_{number}")
    counting = partial(MemoryTracker, device_filter=lambda _: True)
    estimate = "torch.utils._runtime_estimation.get_{}_time"
    try:
        with ExitStack() as inside:
            for name in _TALKERS:
                inside.enter_context(quiet(name))
            inside.enter_context(mock.patch.object(logging.getLogger(_TRACE), "handlers", []))
            for what in ("transfer", "compute"):
                inside.enter_context(mock.patch(estimate.format(what), return_value=0.0))
            inside.enter_context(mock.patch.object(overlap_scheduling, "MemoryTracker", counting))
            said = inside.enter_context(_heard())
            # The other estimator makes real tensors of the sizes of every matrix product and times them on a GPU.
            keywords = {"compute_estimator": "analytical", "collective_estimator": "analytical", **keywords}
            made = overlap_scheduling.schedule_overlap_bucketing(gm, custom_runtime_estimation=milliseconds, **keywords)
    finally:
        overlap_scheduling.get_group_name.cache_clear()  # a cache by node, which would keep every graph alive
    return made, said[-1] if said else None


@contextmanager
def _heard() -> Iterator[list[TorchAccount]]:
    """In the block the accounts that the scheduler logs are put into the list."""
    # The scheduler tells its figures in a log line only, at level INFO. It is not passed on to other loggers.
    found: list[TorchAccount] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if str(record.msg).startswith("Overlap scheduling results") and isinstance(record.args, tuple):
                # The last six arguments: peak bytes before and after, exposed ms, and three more times.
                *_, before, after, exposed, _, _, _ = record.args
                assert isinstance(before, int)
                assert isinstance(after, int)
                assert isinstance(exposed, (int, float))
                found.append(TorchAccount(float(exposed), before, after))

    logger, ear = logging.getLogger(_MODULE), Ear()
    level, propagates = logger.level, logger.propagate
    logger.addHandler(ear)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(ear)
        logger.setLevel(level)
        logger.propagate = propagates


def schedule_overlap_bucketing(
    gm: fx.GraphModule,
    max_in_flight_gb: float = 5,
    collective_bucketing: bool = False,
    pre_bucketing_fsdp_collectives: bool = True,
    custom_runtime_estimation: Milliseconds | None = None,
) -> fx.GraphModule:
    """torch's own function with these keywords; without an estimate of the caller's each node takes a millisecond."""
    made, _ = torch_schedule_overlap(
        gm,
        custom_runtime_estimation or (lambda node, size: 1.0),
        max_in_flight_gb=max_in_flight_gb,
        collective_bucketing=collective_bucketing,
        pre_bucketing_fsdp_collectives=pre_bucketing_fsdp_collectives,
    )
    return made
