"""Puts the libraries of the zoo on the path, behind everything else; torchvision is imported beside a torch for CPUs."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".venv" / "zoo"


def on_path() -> bool:
    """Whether this process was given the libraries, as ranks are with the path of who starts them."""
    return str(FOLDER) in sys.path


def provide() -> None:
    """Make the libraries of ``requirements.txt`` importable, as far as they are installed."""
    if not FOLDER.is_dir():
        return
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    _declare_operators()


def _declare_operators() -> None:
    """torchvision's own operators are built for CUDA and do not load here; it gives them fake kernels all the same."""
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):  # ranks in one process import this more than once
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
