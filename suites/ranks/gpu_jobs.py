"""Jobs for ranks on GPUs."""

from __future__ import annotations

import os

import torch

from pytest_fxbucket.ranks import device


def surroundings(rank: int, world: int, payload: None) -> tuple[str, str, str, int]:
    """Device, GPU, the workspace of cuBLAS, and how deterministic torch is."""
    return (
        device(),
        os.environ["CUDA_VISIBLE_DEVICES"],
        os.environ["CUBLAS_WORKSPACE_CONFIG"],
        torch.get_deterministic_debug_mode(),
    )
