"""torch's automatic overlap scheduler (``torch._inductor.fx_passes.overlap_scheduling``, in torch 2.13), on any install.

What an install without a GPU needs: its roofline imports triton, also where a caller's own estimate is used in its place, so
that is replaced by 0.0; and it counts no memory of the CPU, where fake values live, so its memory limits count that too.
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
"""What a node takes; of a launch also what it would take for other bytes: torch asks for 0, and takes that for its latency."""
_MODULE = "torch._inductor.fx_passes.overlap_scheduling"
_TALKERS = ("torch._inductor.fx_passes.fsdp", "torch._inductor.augmented_graph_helper")
_TRACE = "torch.__trace"
"""torch writes whole graphs out for it as long as it has a handler, and be it one that nobody reads."""


@dataclass(frozen=True, slots=True)
class TorchAccount:
    """What the scheduler says of its schedule, before it puts launches together."""

    exposed_ms: float
    peak_before: int
    peak: int
    """Bytes, of its own liveness."""


def torch_schedule_overlap(
    gm: fx.GraphModule, milliseconds: Milliseconds, held: Sequence[fx.Node] = (), **keywords: Any
) -> tuple[fx.GraphModule, TorchAccount | None]:
    """torch's ``schedule_overlap_bucketing(gm, custom_runtime_estimation=milliseconds, **keywords)``, and its account.

    ``held``: inputs that live throughout, which torch knows by their names alone; others it frees behind their last reader.
    Changes ``gm``, also where it raises, which it does as it likes. Process groups of the graph must be there.
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
            # With the other estimator it makes real tensors of every product's sizes and times those on a GPU.
            keywords = {"compute_estimator": "analytical", "collective_estimator": "analytical", **keywords}
            made = overlap_scheduling.schedule_overlap_bucketing(gm, custom_runtime_estimation=milliseconds, **keywords)
    finally:
        overlap_scheduling.get_group_name.cache_clear()  # by node: it would keep every graph that it ever saw
    return made, said[-1] if said else None


@contextmanager
def _heard() -> Iterator[list[TorchAccount]]:
    """What the scheduler logs of its results while inside."""
    found: list[TorchAccount] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if str(record.msg).startswith("Overlap scheduling results") and isinstance(record.args, tuple):
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
    """torch's own, by these of its keywords; without seconds of the caller's own each node takes a millisecond."""
    made, _ = torch_schedule_overlap(
        gm,
        custom_runtime_estimation or (lambda node, size: 1.0),
        max_in_flight_gb=max_in_flight_gb,
        collective_bucketing=collective_bucketing,
        pre_bucketing_fsdp_collectives=pre_bucketing_fsdp_collectives,
    )
    return made
