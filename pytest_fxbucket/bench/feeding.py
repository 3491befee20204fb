"""What the ranks measured enters pytest-benchmark as samples of its own.

pytest-benchmark times a function by a clock that one may choose. Ours stands still but for the function, which moves it on by
the next sample: so a step of many processes is a round like any other, in its tables, files, comparisons and histograms.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.compat.pytest_benchmark_storage import set_timer

if TYPE_CHECKING:
    import pytest

    from pytest_fxbucket.bench.of_plan import StepTime

PLUGIN = "benchmark"
"""Name of pytest-benchmark among plugins, and of its fixture."""
BUCKETED = "bucketed"


def feed(benchmark: Any, samples: Sequence[float], extra_info: Mapping[str, Any]) -> None:
    """Let pytest-benchmark's fixture take each of `samples` (seconds) as a round."""
    now_s, left = 0.0, iter(samples)

    def slowest_rank() -> float:
        return now_s

    def step() -> None:
        nonlocal now_s
        now_s += next(left, 0.0)  # with --benchmark-cprofile it is called again, when all samples are in

    set_timer(benchmark, slowest_rank)
    benchmark.extra_info.update(extra_info)
    benchmark.pedantic(step, rounds=len(samples), iterations=1)


def info_of(step_time: StepTime, variant: str, test: str = "") -> dict[str, Any]:
    """Return what is kept beside the samples: the whole record with those of the bucketed step, else what they are of.

    `test`: node id of a test whose own measurement it is, which is no stored run of the plan.
    """
    record = step_time.record.to_dict()
    if variant != BUCKETED:
        record = {name: record[name] for name in ("format", "plan", "row")} | {"variant": variant}
    return {"fxbucket": record | ({"test": test} if test else {})}


def why_not(config: pytest.Config, benchmark: Any) -> str:
    """Say why pytest-benchmark would not take samples here; "" if it would. `benchmark`: its fixture, None: it is not there."""
    if benchmark is None:
        return "pytest-benchmark is not there, which keeps the samples; pip install 'pytest-fxbucket[benchmark]'"
    if benchmark.enabled:
        return ""
    if hasattr(config, "workerinput") or config.getoption("dist", "no") != "no" or "PYTEST_XDIST_WORKER" in os.environ:
        return "pytest-benchmark takes no samples in workers of pytest-xdist; run it with -n 0"
    return "pytest-benchmark takes no samples with --benchmark-disable"
