"""Changes graphs and knows nothing of pytest: merging, reordering, and the passes of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.first_use import on_first_use
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
# These import inductor, which takes seconds.
__getattr__ = on_first_use(__name__, {"passes.compiled": ["bucketing_backend", "bucketing_post_grad_pass"]})
