"""Changes graphs and knows nothing of pytest: merging, reordering, and the passes of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_fxbucket.passes.bucketer import Bucketer
from pytest_fxbucket.passes.manual import manual_overlap_bucketing
from pytest_fxbucket.passes.overlap_bucketing import schedule_overlap_bucketing
from pytest_fxbucket.passes.scheduler import Scheduler

if TYPE_CHECKING:
    from pytest_fxbucket.passes.compiled import bucketing_backend, bucketing_post_grad_pass

__all__ = [
    "Bucketer",
    "Scheduler",
    "bucketing_backend",
    "bucketing_post_grad_pass",
    "manual_overlap_bucketing",
    "schedule_overlap_bucketing",
]


def __getattr__(name: str) -> Any:
    """Import what is for ``torch.compile`` when it is first asked for: it imports inductor, which takes seconds."""
    if name in __all__:
        from pytest_fxbucket.passes import compiled

        return getattr(compiled, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
