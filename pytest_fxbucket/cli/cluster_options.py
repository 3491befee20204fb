"""What commands share that simulate a plan: the cluster and mesh asked for, the preset file to save one in, milliseconds."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.plan.cluster import PRESETS
from pytest_fxbucket.plan.consistency import agree
from pytest_fxbucket.plan.rules import DEGREES
from pytest_fxbucket.plan.schema import rule_of
from pytest_fxbucket.words import nearest

if TYPE_CHECKING:
    from pytest_fxbucket.cost.cluster import Cluster
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.simulate.calibrate import CalibratedCluster


def add_cluster(parser: ArgumentParser) -> None:
    """Add the cluster that a plan is simulated on, and sizes of its mesh."""
    parser.add_argument(
        "--cluster", metavar="PRESET", help=f"{', '.join(PRESETS)} or a TOML file; left out: the plan's [cluster]"
    )
    parser.add_argument(
        "--world",
        action="append",
        default=[],
        metavar="DIM=SIZE",
        help="a size of the mesh instead of [parallel]'s, as in dp_shard=512; any number of them",
    )


def cluster_asked(plan: Plan, asked: str | None) -> Cluster:
    """The preset ``asked``, else the plan's own cluster. Raises UsageError if there is neither, PlanError for a wrong one."""
    from pytest_fxbucket.cost.cluster import cluster_named, cluster_of

    if asked is not None:
        # A file that was typed is looked for from the working folder; one in a plan lies beside the plan.
        return cluster_named(asked, Path())
    found = cluster_of(plan)
    if found is None:
        raise UsageError(f"{plan.path} has no [cluster]; name one, as in --cluster {PRESETS[0]}")
    return found


def on_world(plan: Plan, sizes: Sequence[str]) -> Plan:
    """``plan`` with ``sizes``, each as ``dp_shard=512``. Raises UsageError, or PlanError for a mesh that cannot be."""
    degrees: dict[str, Any] = {}
    for text in sizes:
        dim, _, size = text.partition("=")
        if dim not in DEGREES:
            raise UsageError(f'--world {text}: there is no dimension "{dim}"{nearest(dim, list(DEGREES))}')
        # isdigit() is true of "²" too, which int() refuses, as it does thousands of digits.
        if not size.isascii() or not size.isdigit() or len(size) > 18:
            raise UsageError(f"--world {text}: a size must be a whole number, as in dp_shard=512")
        degrees[dim] = cast(int, rule_of("parallel", dim).read(int(size), f"--world {dim}"))
    if degrees:  # none of its ranks is run
        plan = replace(plan, parallel=replace(plan.parallel, **degrees), run=replace(plan.run, world={}))
        agree(plan, f"{plan.path} with --world {' '.join(sizes)}")
    return plan


def ms(seconds: float) -> str:
    """In milliseconds, to the microsecond."""
    return f"{seconds * 1000:,.3f}"


def refuse_preset(path: Path) -> None:
    """Raise UsageError if :func:`save_preset` would: if ``path`` is there, has another ending, or is in no folder."""
    if path.suffix != ".toml":
        raise UsageError(f"--save {path}: a preset file ends in .toml")
    if os.path.lexists(path):
        raise UsageError(f"--save {path} is there already; remove it, or name another file")
    if not path.parent.is_dir():
        raise UsageError(f"--save {path} cannot be written: there is no folder {path.parent}")


def save_preset(path: Path, cluster: Cluster, calibrated: CalibratedCluster | None) -> None:
    """Write the file ``path``. Raises UsageError if it cannot be written."""
    from pytest_fxbucket.cost.cluster import preset_text

    refuse_preset(path)
    # Asked before the simulation already, which took a while: somebody may have written the file meanwhile.
    about = [f"The cluster {cluster.name}.", *([f"Calibrated; {calibrated}."] if calibrated else [])]
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(preset_text(cluster, about))
    except OSError as error:
        raise UsageError(f"--save {path} cannot be written: {error.strerror or error}") from error
