"""The machine that ``make gpu`` runs on: what it is, and what it lacks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from pytest_fxbucket.backends import choose
from pytest_fxbucket.ranks.machine import has_mps, loaded_nccl, this_machine

ROOT = Path(__file__).resolve().parents[2]


def described() -> dict[str, str]:
    """GPU, driver and versions, and the commit: results of others are not taken for results of this."""
    gpu = said_by("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or "none, none"
    name, _, driver = gpu.splitlines()[0].rpartition(", ")
    changed = said_by("git", "status", "--porcelain", "--untracked-files=no")
    commit = said_by("git", "rev-parse", "--short=12", "HEAD") or "unknown"
    nccl = loaded_nccl()
    return {
        "GPU": name,
        "driver": driver,
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, nccl)) if nccl else "none",
        "MPS": "runs" if has_mps() else "does not run",
        "commit": commit + ("-dirty" if changed else ""),
    }


def lacking() -> str:
    """What keeps several ranks from one GPU here; "": nothing does."""
    return choose("nccl", 2, this_machine()).lacking


def said_by(*command: str) -> str:
    """What ``command`` prints; "" where there is no such program, or it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
