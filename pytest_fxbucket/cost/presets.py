"""The cluster of a plan: a preset's figures with those that the plan has of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_fxbucket.cost.cluster import Cluster, Link
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.cluster import PRESETS, lacking
from pytest_fxbucket.plan.cluster import Cluster as Table
from pytest_fxbucket.plan.cluster import Link as TableLink
from pytest_fxbucket.plan.load import load_cluster
from pytest_fxbucket.words import nearest, one_or_other, show

if TYPE_CHECKING:
    from pytest_fxbucket.plan.schema import Plan

_T = TypeVar("_T")
FOLDER = Path(__file__).parent / "clusters"
"""Has a file for each built-in preset."""
_MEGA, _GIGA, _TERA, _MICROSECONDS = 1e6, 1e9, 1e12, 1e6


def cluster_of(plan: Plan) -> Cluster | None:
    """What ``plan`` is simulated on; None without ``[cluster]``.

    Raises PlanError for a preset file that is wrong, or that leaves figures out.
    """
    if plan.cluster is None:
        return None
    return figures_of(plan.cluster, plan.path.parent, f"{plan.path}: [cluster]")


def cluster_named(name: str, folder: Path) -> Cluster:
    """The preset ``name``: a built-in one, or a file below ``folder``. Raises PlanError for one that there is not."""
    if name not in PRESETS and not name.endswith(".toml"):
        known = nearest(name, list(PRESETS)) or f"; there are {one_or_other([show(one) for one in PRESETS])}, and files"
        raise PlanError(f"there is no preset {show(name)}{known}")
    return figures_of(Table(preset=name), folder, f"the preset {show(name)}")


def figures_of(table: Table, folder: Path, where: str) -> Cluster:
    """Figures of ``table`` over those of its preset, whose path begins at ``folder``.

    Raises PlanError, beginning with ``where``, for what neither has.
    """
    whole = _with_preset(table, folder)
    if missing := lacking(whole):
        raise PlanError(f"{where} has no {missing}, and nothing that it is made from has")
    assert whole.memory_bandwidth is not None  # lacking has looked at these
    assert whole.memory_gb is not None
    assert whole.devices_per_node is not None
    return Cluster(
        name=_name(table),
        flops={dtype: rate * _TERA for dtype, rate in whole.tflops.items()},
        memory_bandwidth=whole.memory_bandwidth * _GIGA,
        memory=whole.memory_gb * 2**30,
        devices_per_node=whole.devices_per_node,
        within=_link(whole.within),
        between=_link(whole.between),
        compute_efficiency=_or(whole.compute_efficiency, 1.0),
        memory_efficiency=_or(whole.memory_efficiency, 1.0),
        network_efficiency=_or(whole.network_efficiency, 1.0),
        launch=_or(whole.launch_us, 0.0) / _MICROSECONDS,
        view=_or(whole.view_us, 0.0) / _MICROSECONDS,
        enqueue=_or(whole.enqueue_us, 0.0) / _MICROSECONDS,
        enqueue_per_byte=_or(whole.enqueue_us_per_mb, 0.0) / _MICROSECONDS / _MEGA,
        waiting=_or(whole.wait_us, 0.0) / _MICROSECONDS,
        least=_or(whole.kernel_us, 0.0) / _MICROSECONDS,
        collective=_or(whole.collective_us, 0.0) / _MICROSECONDS,
        blocking=bool(whole.blocking),
        rounding=whole.allocation_bytes or 1,
    )


def _with_preset(table: Table, folder: Path) -> Table:
    """``table`` over its preset, which may be a file over a built-in one."""
    if table.preset is None:
        return table
    built_in = table.preset in PRESETS
    path = FOLDER / f"{table.preset}.toml" if built_in else folder / table.preset
    base = load_cluster(path)
    if base.preset is not None:
        if base.preset not in PRESETS:
            raise PlanError(f"{path}: preset must be a built-in one, not {show(base.preset)}; a preset is made from one file")
        base = _over(load_cluster(FOLDER / f"{base.preset}.toml"), base)
    return _over(base, table)


def _over(base: Table, table: Table) -> Table:
    found: dict[str, Any] = {
        spec.name: _joined(getattr(base, spec.name), getattr(table, spec.name)) for spec in dataclasses.fields(Table)
    }
    return Table(**found)


def _joined(base: object, own: object) -> object:
    if isinstance(base, Mapping) and isinstance(own, Mapping):
        return {**base, **own}
    if isinstance(base, TableLink) and isinstance(own, TableLink):
        return TableLink(_or(own.bandwidth, base.bandwidth), _or(own.latency_us, base.latency_us))
    return base if own is None else own


def _or(value: _T | None, other: _T) -> _T:
    return other if value is None else value


def _link(table: TableLink | None) -> Link:
    assert table is not None
    assert table.bandwidth is not None
    assert table.latency_us is not None
    return Link(table.bandwidth * _GIGA, table.latency_us / _MICROSECONDS)


def _name(table: Table) -> str:
    """As people know it."""
    if table.preset is None:
        return "the plan's own cluster"
    name = table.preset.removesuffix(".toml")
    return name if dataclasses.replace(table, cost=None) == Table(preset=table.preset) else f"{name} with figures of its own"
