"""Writes a cluster as a preset file, which ``[cluster] preset`` and ``--cluster`` read back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.plan.toml_text import to_toml

if TYPE_CHECKING:
    from pytest_fxbucket.cost.cluster import Cluster, Link
    from pytest_fxbucket.simulate.calibrate import Calibrated

_DIGITS = 6
"""What a measurement is good for, and more."""


def refuse_preset(path: Path) -> None:
    """Raise UsageError if :func:`save_preset` would: if ``path`` is there, has another ending, or is in no folder."""
    if path.suffix != ".toml":
        raise UsageError(f"--save {path}: a preset file ends in .toml")
    if os.path.lexists(path):
        raise UsageError(f"--save {path} is there already; remove it, or name another file")
    if not path.parent.is_dir():
        raise UsageError(f"--save {path} cannot be written: there is no folder {path.parent}")


def save_preset(path: Path, cluster: Cluster, calibrated: Calibrated | None) -> None:
    """Write the file ``path``. Raises UsageError if it cannot be written."""
    refuse_preset(path)
    about = [f"The cluster {cluster.name}.", *([f"Calibrated; {calibrated}."] if calibrated else [])]
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(preset_text(cluster, about))
    except OSError as error:
        raise UsageError(f"--save {path} cannot be written: {error.strerror or error}") from error


def preset_text(cluster: Cluster, about: Sequence[str]) -> str:
    """All figures of ``cluster`` with six digits, below ``about``, lines of comment."""
    figures = {
        "memory_bandwidth": _short(cluster.memory_bandwidth / 1e9),
        "memory_gb": _short(cluster.memory / 2**30),
        "devices_per_node": cluster.devices_per_node,
        "within": _link(cluster.within),
        "between": _link(cluster.between),
        "compute_efficiency": _short(cluster.compute_efficiency),
        "memory_efficiency": _short(cluster.memory_efficiency),
        "network_efficiency": _short(cluster.network_efficiency),
        "launch_us": _short(cluster.launch * 1e6),
        "view_us": _short(cluster.view * 1e6),
        "enqueue_us": _short(cluster.enqueue * 1e6),
        "enqueue_us_per_mb": _short(cluster.enqueue_per_byte * 1e12),
        "wait_us": _short(cluster.waiting * 1e6),
        "kernel_us": _short(cluster.least * 1e6),
        "collective_us": _short(cluster.collective * 1e6),
        "blocking": cluster.blocking,
        "allocation_bytes": cluster.rounding,
        "tflops": {dtype: _short(rate / 1e12) for dtype, rate in cluster.flops.items()},
    }
    lines = [*(f"# {line}" for line in about), *(f"{key} = {to_toml(value)}" for key, value in figures.items())]
    return "\n".join(lines) + "\n"


def _link(link: Link) -> dict[str, float]:
    return {"bandwidth": _short(link.bandwidth / 1e9), "latency_us": _short(link.latency * 1e6)}


def _short(figure: float) -> float:
    return float(f"{figure:.{_DIGITS}g}")
