"""Pipeline engines by name: what each takes of a stage, and what runs the stages of a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.first_use import on_first_use

if TYPE_CHECKING:
    from pytest_fxbucket.pipeline.targets.registry import Setup, Target, target_of
    from pytest_fxbucket.pipeline.targets.ties import sum_tied_gradients

__all__ = ["Setup", "Target", "sum_tied_gradients", "target_of"]
__getattr__ = on_first_use(
    __name__,
    {"pipeline.targets.registry": ["Setup", "Target", "target_of"], "pipeline.targets.ties": ["sum_tied_gradients"]},
)
