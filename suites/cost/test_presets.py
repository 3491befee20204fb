"""A plan's cluster: built-in presets, files, and what a plan has of its own over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.cost.cluster import FOLDER, Cluster, Link, cluster_named, cluster_of
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.cluster import PRESETS
from pytest_fxbucket.plan.load import parse_plans

PLAN = '[model]\nfactory = "m:build"\nbatch = "m:batch"\n[parallel]\ndp_shard = 4\n[bucket]\nplan = ["a"]\n'


def cluster(table: str, folder: Path = Path()) -> Cluster | None:
    return cluster_of(parse_plans(f"{PLAN}{table}", folder / "p.toml")[0])


def test_every_preset_is_a_file_and_every_file_a_preset() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_every_figure_and_each_with_where_it_is_from(name: str) -> None:
    found = cluster_named(name, Path())
    assert found.name == name
    assert found.within.bandwidth < found.memory_bandwidth
    assert found.flops["bfloat16"] <= found.memory_bandwidth * 1000, "no machine has so much compute for its memory"
    text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    assert "ssumption" in text or "data sheet" in text


def test_units_of_a_plan_become_bytes_and_seconds() -> None:
    found = cluster(
        "[cluster]\ntflops = { float32 = 2 }\nmemory_bandwidth = 3\nmemory_gb = 4\ndevices_per_node = 5\n"
        "within = { bandwidth = 6, latency_us = 7 }\nbetween = { bandwidth = 8, latency_us = 9 }\nlaunch_us = 10\n"
        "kernel_us = 11\ncollective_us = 12\nblocking = true\nallocation_bytes = 512\ncompute_efficiency = 0.5\n"
        "memory_efficiency = 0.25\nnetwork_efficiency = 0.75"
    )
    assert found == Cluster(
        name="the plan's own cluster",
        flops={"float32": 2e12},
        memory_bandwidth=3e9,
        memory=4 * 2**30,
        devices_per_node=5,
        within=Link(6e9, 7e-6),
        between=Link(8e9, 9e-6),
        compute_efficiency=0.5,
        memory_efficiency=0.25,
        network_efficiency=0.75,
        launch=10e-6,
        least=11e-6,
        collective=12e-6,
        blocking=True,
        rounding=512,
    )


def test_without_a_table_there_is_no_cluster() -> None:
    assert cluster("") is None


def test_a_plans_own_figures_stand_over_the_presets_one_by_one() -> None:
    plain = cluster_named("h100-sxm", Path())
    own = cluster('[cluster]\npreset = "h100-sxm"\nwithin = { bandwidth = 1 }\ntflops = { bfloat16 = 1 }\nlaunch_us = 0')
    assert own is not None
    assert own.within == Link(1e9, plain.within.latency)
    assert own.flops == {**plain.flops, "bfloat16": 1e12}
    assert (own.launch, own.between, own.name) == (0.0, plain.between, "h100-sxm with figures of its own")


def test_a_file_beside_the_plan_stands_over_a_built_in_preset(tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text('preset = "b200"\ndevices_per_node = 4\n', encoding="utf-8")
    found, plain = cluster('[cluster]\npreset = "ours.toml"', tmp_path), cluster_named("b200", Path())
    assert found is not None
    assert (found.name, found.devices_per_node, found.flops) == ("ours", 4, plain.flops)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("devices_per_node = 4\n", "p.toml: [cluster] has no tflops, and nothing that it is made from has"),
        ("device_per_node = 4\n", 'ours.toml has no key "device_per_node"; did you mean "devices_per_node"?'),
        ("memory_gb = 0\n", "ours.toml: memory_gb must be a number above 0, not 0"),
        ('preset = "theirs.toml"\n', 'ours.toml: preset must be a built-in one, not "theirs.toml"'),
        ("memory_gb\n", "ours.toml:1: this is not TOML"),
        (None, "ours.toml: the preset cannot be read: No such file or directory"),
    ],
)
def test_a_bad_file_is_told_in_one_sentence(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "ours.toml").write_text(text, encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        cluster('[cluster]\npreset = "ours.toml"', tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_preset_that_there_is_not_is_told_with_the_nearest() -> None:
    with pytest.raises(PlanError, match=r'there is no preset "h100"; did you mean "h100-sxm"\?'):
        cluster_named("h100", Path())
