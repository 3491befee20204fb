"""``[cluster]`` and the limits of what is simulated on it: what a good table gives, and what a bad one is told."""

from __future__ import annotations

import pytest

from pytest_fxbucket.plan.cluster import Cluster, Link
from suites.plan.plan_texts import BUCKET, MODEL, PARALLEL, plan_of, plans_of, refusal

REST = MODEL + PARALLEL + BUCKET
FIGURES = """[cluster]
tflops = { float32 = 67, bfloat16 = 989 }
memory_bandwidth = 3350
memory_gb = 80
devices_per_node = 8
within = { bandwidth = 450, latency_us = 2 }
between = { bandwidth = 50, latency_us = 5 }
"""


def test_a_plan_has_no_cluster_unless_it_says_so() -> None:
    plan = plan_of(REST)
    assert plan.cluster is None
    assert plan.checks.overlap is False


def test_a_table_of_figures_is_what_it_says() -> None:
    cluster = plan_of(REST, FIGURES).cluster
    assert cluster == Cluster(
        tflops={"float32": 67, "bfloat16": 989},
        memory_bandwidth=3350,
        memory_gb=80,
        devices_per_node=8,
        within=Link(450, 2),
        between=Link(50, 5),
    )


def test_a_row_of_the_matrix_may_be_on_another_cluster() -> None:
    base, row = plans_of(REST, '[cluster]\npreset = "h100-sxm"\n[[matrix]]\nid = "x"\ncluster.preset = "b200"')
    assert [one.cluster and one.cluster.preset for one in (base, row)] == ["h100-sxm", "b200"]


def test_limits_are_of_the_whole_step_or_of_a_direction() -> None:
    limits = "overlap = { exposed_max_ms = 1.5, forward = { hidden_min = 0.9 }, backward = {} }"
    overlap = plan_of(REST, f'[cluster]\npreset = "b200"\n[checks]\n{limits}').checks.overlap
    assert overlap
    found = {name: (one.exposed_max_ms, one.hidden_min) for name, one in overlap.limits().items()}
    assert found == {"": (1.5, None), "forward": (None, 0.9)}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('preset = "h100_sxm"', '[cluster] preset must be "h100-sxm", "h200-sxm", "b200", "a100-80g" or "cpu-gloo"'),
        ('preset = "h100_sxm"', 'not "h100_sxm"; did you mean "h100-sxm"?'),
        ("preset = 100", 'or a file such as "ours.toml", not 100'),
        ('preset = "b200"\nmemory_bandwidth = -1', "[cluster] memory_bandwidth must be a number above 0, not -1"),
        ('preset = "b200"\nmemory_gb = nan', "[cluster] memory_gb must be a number above 0, not nan"),
        ('preset = "b200"\nwithin = { bandwidth = 0 }', "[cluster] within.bandwidth must be a number above 0, not 0"),
        ('preset = "b200"\nwithin = { bandwith = 1 }', '[cluster] within has no key "bandwith"; did you mean "bandwidth"?'),
        (
            'preset = "b200"\nbetween = { latency_us = -1 }',
            "[cluster] between.latency_us must be a number of at least 0, not -1",
        ),
        ('preset = "b200"\ntflops = { bf16 = 9 }', '[cluster] tflops has no dtype "bf16"; did you mean "bfloat16"?'),
        ('preset = "b200"\ntflops = { zz = 9 }', '[cluster] tflops has no dtype "zz"; known are float64, float32'),
        ('preset = "b200"\ntflops = { bfloat16 = -9 }', "[cluster] tflops.bfloat16 must be a number above 0, not -9"),
        ('preset = "b200"\ntflops = 9', "[cluster] tflops must be a table such as { bfloat16 = 989, float32 = 67 }, not 9"),
        ('preset = "b200"\ncompute_efficiency = 1.5', "[cluster] compute_efficiency must be a number above 0 and at most 1"),
        ('preset = "b200"\nnetwork_efficiency = 0', "[cluster] network_efficiency must be a number above 0 and at most 1"),
        ('preset = "b200"\ncost = "mine"', '[cluster] cost must be "module:callable", not "mine"'),
        ("", "[cluster] has neither tflops nor a preset that has it; give preset"),
    ],
)
def test_a_bad_table_is_told_in_one_sentence(table: str, said: str) -> None:
    assert said in refusal(REST, f"[cluster]\n{table}")


@pytest.mark.parametrize(
    ("line", "without", "missing"),
    [
        ("within = { bandwidth = 450, latency_us = 2 }", "within = { bandwidth = 450 }", "within.latency_us"),
        ("between = { bandwidth = 50, latency_us = 5 }", "between = { latency_us = 5 }", "between.bandwidth"),
        ("float32 = 67, ", "", "tflops.float32"),
        ("memory_gb = 80\n", "", "memory_gb"),
    ],
)
def test_a_cluster_without_a_preset_has_all_figures(line: str, without: str, missing: str) -> None:
    assert f"[cluster] has neither {missing} nor a preset" in refusal(REST, FIGURES.replace(line, without))


@pytest.mark.parametrize(
    ("checks", "cluster", "said"),
    [
        ("{ hidden_min = 0.9 }", "", "[checks] overlap simulates the step on [cluster], and there is none"),
        ("true", '[cluster]\npreset = "b200"', "[checks] overlap has no limit; give it one"),
        ("{ forward = {} }", '[cluster]\npreset = "b200"', "[checks] overlap has no limit; give it one"),
        ("{ hidden_min = 1.5 }", "", "[checks] overlap.hidden_min must be a number from 0 and at most 1, not 1.5"),
        ("{ exposed_max_ms = -1 }", "", "[checks] overlap.exposed_max_ms must be a number of at least 0, not -1"),
        ("{ forward = { hidden = 1 } }", "", '[checks] overlap.forward has no key "hidden"; did you mean "hidden_min"?'),
    ],
)
def test_limits_that_hold_nothing_are_told_in_one_sentence(checks: str, cluster: str, said: str) -> None:
    assert said in refusal(REST, cluster, f"[checks]\noverlap = {checks}")


@pytest.mark.parametrize(
    ("limits", "cluster", "said"),
    [
        ("{ peak_max_gb = 70 }", "", "[checks] memory simulates the step on [cluster], and there is none"),
        ("true", '[cluster]\npreset = "b200"', "[checks] memory has no limit; give it one"),
        ("{ peak_max_gb = 0 }", "", "[checks] memory.peak_max_gb must be a number above 0, not 0"),
        ("{ increase_max = -1 }", "", "[checks] memory.increase_max must be a number of at least 0, not -1"),
        ("{ increase = 1 }", "", '[checks] memory has no key "increase"; did you mean "increase_max"?'),
    ],
)
def test_limits_of_memory_that_hold_nothing_are_told_in_one_sentence(limits: str, cluster: str, said: str) -> None:
    assert said in refusal(REST, cluster, f"[checks]\nmemory = {limits}")
