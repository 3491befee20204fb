"""The origin of a measurement: the commit, whether files differ from it, the kind of machine, and the plan's workload."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.commit import Repository
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.ranks.machine import nvidia_smi

if TYPE_CHECKING:
    from pytest_fxbucket.bench.record import MachineKind
    from pytest_fxbucket.plan.schema import Plan

_CODE = ("*.py", "*.toml")
_GPU = re.compile(r"^GPU \d+: (.+?) \(UUID", re.MULTILINE)
# The key depends on the architecture: x86, Raspberry Pi, older ARM, POWER.
_MODEL = re.compile(r"^(?:model name|Model|Hardware|cpu)\s*:\s*(.+)$", re.MULTILINE)
_WORKLOAD = ("model", "graph", "parallel", "step", "optimizer")


def commit_of(file: Path) -> tuple[str | None, bool]:
    """(SHA of HEAD in the repository of ``file``, whether files there differ from it); of new files only code and plans count.

    (None, False) if there is no repository, no commit yet, or no git. Folders of stored runs, at any depth, are left out, since
    a run that stores its samples would otherwise make the next one dirty.
    """
    try:
        repository = Repository.of(file, "a benchmark")
        sha = repository.git("rev-parse", "--verify", "--quiet", "HEAD^{commit}").strip()
        but = [f":(top,exclude,glob)**/{name}/**" for name in (".benchmarks", ".fxbucket")]
        changed = repository.git("status", "--porcelain", "--untracked-files=no", "--", ":/", *but)
        new = repository.git("ls-files", "--others", "--exclude-standard", "--", *_CODE, *but)
    except FxbucketError:
        return None, False
    return sha, bool(changed or new)


def machine_kind(cpuinfo: Path = Path("/proc/cpuinfo"), source: Callable[[], str] = nvidia_smi) -> MachineKind:
    """System, architecture, model of the CPU, cores that this process may use, names of all GPUs; not the host's name.

    ``source`` gives the text of ``nvidia-smi -L``. If /proc/cpuinfo has no model, as on some ARM, the CPU is named by
    ``platform``.
    """
    try:
        found = _MODEL.search(cpuinfo.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        found = None
    return {
        "system": platform.system(),
        "arch": platform.machine(),
        "cpu": " ".join(found[1].split()) if found else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _GPU.findall(source()),
    }


def workload_of(plan: Plan) -> Mapping[str, Any]:
    """The tables of the plan that define the unbucketed step, as JSON, and the mesh that is run."""
    tables = {name: _plain(getattr(plan, name)) for name in _WORKLOAD}
    # Older stored runs are from before there were these two tables. A plan without them must stay comparable with such runs.
    if plan.override:
        tables["override"] = _plain(plan.override)
    if plan.pipeline is not None:
        tables["pipeline"] = _plain(plan.pipeline)
    made: dict[str, Any] = json.loads(json.dumps({**tables, "world": dict(plan.run_degrees)}, default=_text))
    return made


def _plain(table: Any) -> Any:
    if isinstance(table, tuple):
        return [_plain(each) for each in table]
    return dataclasses.asdict(table) if dataclasses.is_dataclass(table) and not isinstance(table, type) else table


def _text(value: object) -> str:
    return value.as_posix() if isinstance(value, Path) else str(value)
