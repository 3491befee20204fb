"""Keys of [overlap] and [bucket] that a schedule found by itself takes, and those that it cannot stand beside."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.load import parse_plans

PLAN = """
[model]
factory = "m:build"
batch = "m:batch"

[parallel]
dp_shard = 2

[bucket]
{bucket}

[overlap]
{overlap}
{cluster}
"""
CLUSTER = '[cluster]\npreset = "h100-sxm"'
ENTRIES = 'plan = ["a", "b"]'
AUTO = 'schedule = "auto"'


def refused(bucket: str = ENTRIES, overlap: str = AUTO, cluster: str = CLUSTER) -> str:
    with pytest.raises(PlanError) as caught:
        parse_plans(PLAN.format(bucket=bucket, overlap=overlap, cluster=cluster), Path("p.toml"))
    return str(caught.value)


@pytest.mark.parametrize("bucket", [ENTRIES, "enabled = false\n" + ENTRIES, 'by = "overlap"', f'by = "overlap"\n{ENTRIES}'])
def test_a_schedule_takes_its_limits_on_a_cluster(bucket: str) -> None:
    limits = "max_memory_increase = 0.1\nmax_memory_increase_gb = 1\nmax_in_flight_gb = 2\nmax_prefetch = 3"
    (plan,) = parse_plans(PLAN.format(bucket=bucket, overlap=f"{AUTO}\n{limits}", cluster=CLUSTER), Path("p.toml"))
    found = plan.overlap
    assert (found.max_memory_increase, found.max_memory_increase_gb, found.max_in_flight_gb, found.max_prefetch) == (
        0.1,
        1,
        2,
        3,
    )
    assert plan.bucket.has_entries == (ENTRIES in bucket)


@pytest.mark.parametrize(
    ("bucket", "overlap", "cluster", "words"),
    [
        (ENTRIES, AUTO, "", 'p.toml: [overlap] schedule = "auto" goes by seconds on [cluster], and there is none'),
        (ENTRIES, f"{AUTO}\nprefetch = 2", CLUSTER, '[overlap] prefetch = 2 says by hand what schedule = "auto" finds'),
        (ENTRIES, f"{AUTO}\ndefer_reduce = false", CLUSTER, "[overlap] defer_reduce = false says by hand"),
        (ENTRIES, f'{AUTO}\nlaunch_at = {{ forward = {{ "a" = "b" }} }}', CLUSTER, "[overlap] launch_at"),
        (
            ENTRIES,
            "max_prefetch = 2",
            CLUSTER,
            '[overlap] max_prefetch is a limit of schedule = "auto", and the schedule is "manual"',
        ),
        (ENTRIES, 'schedule = "automatic"', CLUSTER, 'did you mean "auto"'),
        (ENTRIES, f"{AUTO}\nmax_prefetch = 0", CLUSTER, "[overlap] max_prefetch must be"),
        (ENTRIES, f"{AUTO}\nmax_memory_increase = -0.1", CLUSTER, "[overlap] max_memory_increase must be"),
        (ENTRIES, f"{AUTO}\nmax_in_flight_gb = nan", CLUSTER, "[overlap] max_in_flight_gb must be"),
        (
            'by = "overlap"',
            "",
            CLUSTER,
            '[bucket] by = "overlap" keeps hidden what [overlap] schedule = "auto" hides; set that',
        ),
        ('by = "overlap"\ncap_mb = [1, 2]', AUTO, CLUSTER, '[bucket] by = "overlap" takes one cap_mb for all buckets, not 2'),
        ('by = "overlap"\nunplanned = "root"', AUTO, CLUSTER, 'unplanned = "root" means nothing with by = "overlap"'),
    ],
)
def test_what_contradicts_is_one_sentence(bucket: str, overlap: str, cluster: str, words: str) -> None:
    said = refused(bucket, overlap, cluster)
    assert words in said
    assert "\n" not in said
