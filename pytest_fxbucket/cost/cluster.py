"""What a cluster can do, as a few figures, and which figures: those of a preset, with what a plan says over them.

Plain data; imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.cluster import PRESETS, lacking
from pytest_fxbucket.plan.cluster import Cluster as Table
from pytest_fxbucket.plan.cluster import Link as TableLink
from pytest_fxbucket.plan.load import load_cluster
from pytest_fxbucket.plan.toml_text import to_toml
from pytest_fxbucket.words import nearest, one_or_other, show

if TYPE_CHECKING:
    from pytest_fxbucket.plan.schema import Plan


@dataclass(frozen=True, slots=True)
class Link:
    """How one device reaches others."""

    bandwidth: float
    """Bytes a second that a device sends, and receives at the same time."""
    latency: float
    """Seconds of one hop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Figures of one kind of cluster, as its makers print them; efficiencies say what of them is had."""

    name: str
    flops: Mapping[str, float]
    """Dense floating point operations a second, by dtype: ``bfloat16``. A dtype that is not there counts as ``float32``."""
    memory_bandwidth: float
    """Bytes a second between a device and its own memory."""
    memory: float
    """Bytes of a device."""
    devices_per_node: int
    within: Link
    """Between devices of a node."""
    between: Link
    """Between nodes, for each device."""
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    network_efficiency: float = 1.0
    launch: float = 0.0
    """Seconds that the host takes to call an operator."""
    view: float = 0.0
    """Seconds that the host takes to call one that runs no kernel, a view."""
    enqueue: float = 0.0
    """Seconds that the host takes to launch a collective, beyond :attr:`launch`."""
    enqueue_per_byte: float = 0.0
    """Seconds more for each byte of its larger side, as where the host copies what it hands over."""
    waiting: float = 0.0
    """Seconds that the host takes to call a wait, even for what is there."""
    least: float = 0.0
    """Seconds that any kernel takes."""
    collective: float = 0.0
    """Seconds that any collective takes, whatever it carries."""
    blocking: bool = False
    """Whether the host itself computes, as on a CPU: no operator is called before the one before it is done."""
    rounding: int = 1
    """Bytes that an allocation is a multiple of."""

    def on_nodes(self, ranks: Sequence[int]) -> list[int]:
        """How many of ``ranks`` are on each node that has any, ascending; ranks fill nodes in order."""
        return sorted(Counter(rank // self.devices_per_node for rank in ranks).values())


_T = TypeVar("_T")
FOLDER = Path(__file__).parent / "clusters"
"""Has a file for each built-in preset."""
_MEGA, _GIGA, _TERA, _MICROSECONDS = 1e6, 1e9, 1e12, 1e6
_DIGITS = 6
"""Digits of a written figure: more than a measurement is good for."""


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
    """Figures of ``table``, and of its preset where it has none itself; a preset's file is looked for below ``folder``.

    Raises PlanError, beginning with ``where``, for a figure that neither has.
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
        memory=whole.memory_gb * 2**30,  # memory is told in binary units, all rates in decimal ones
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
    return other if value is None else value  # a figure may well be 0


def _link(table: TableLink | None) -> Link:
    assert table is not None
    assert table.bandwidth is not None
    assert table.latency_us is not None
    return Link(table.bandwidth * _GIGA, table.latency_us / _MICROSECONDS)


def _name(table: Table) -> str:
    """What messages call the cluster."""
    if table.preset is None:
        return "the plan's own cluster"
    name = table.preset.removesuffix(".toml")
    # A cost model of the plan's own leaves the figures those of the preset.
    return name if dataclasses.replace(table, cost=None) == Table(preset=table.preset) else f"{name} with figures of its own"


def preset_text(cluster: Cluster, about: Sequence[str]) -> str:
    """All figures of ``cluster`` with six digits, below ``about``, lines of comment."""
    figures = {
        "memory_bandwidth": _short(cluster.memory_bandwidth / _GIGA),
        "memory_gb": _short(cluster.memory / 2**30),
        "devices_per_node": cluster.devices_per_node,
        "within": _link_text(cluster.within),
        "between": _link_text(cluster.between),
        "compute_efficiency": _short(cluster.compute_efficiency),
        "memory_efficiency": _short(cluster.memory_efficiency),
        "network_efficiency": _short(cluster.network_efficiency),
        "launch_us": _short(cluster.launch * _MICROSECONDS),
        "view_us": _short(cluster.view * _MICROSECONDS),
        "enqueue_us": _short(cluster.enqueue * _MICROSECONDS),
        "enqueue_us_per_mb": _short(cluster.enqueue_per_byte * (_MICROSECONDS * _MEGA)),
        "wait_us": _short(cluster.waiting * _MICROSECONDS),
        "kernel_us": _short(cluster.least * _MICROSECONDS),
        "collective_us": _short(cluster.collective * _MICROSECONDS),
        "blocking": cluster.blocking,
        "allocation_bytes": cluster.rounding,
        "tflops": {dtype: _short(rate / _TERA) for dtype, rate in cluster.flops.items()},
    }
    lines = [*(f"# {line}" for line in about), *(f"{key} = {to_toml(value)}" for key, value in figures.items())]
    return "\n".join(lines) + "\n"


def _link_text(link: Link) -> dict[str, float]:
    return {"bandwidth": _short(link.bandwidth / _GIGA), "latency_us": _short(link.latency * _MICROSECONDS)}


def _short(figure: float) -> float:
    return float(f"{figure:.{_DIGITS}g}")
