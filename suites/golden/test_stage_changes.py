"""What a golden that does not fit says of pipeline stages: which stage, which tensor that crosses, which rank."""

from __future__ import annotations

from pytest_fxbucket.golden.mismatch import changes


def test_lines_on_pipeline_stages_are_named_by_those_above_them() -> None:
    """Each is compared, and not the last one alone."""
    head = "mesh pp=2\npipeline 1F1B, 2 stages, 4 microbatches\n  stage 0 on pp 0\n"
    crossing = "    forward to stage 1: 2 tensors, {} bytes\n      a of stage 0, float32 8\n      a of stage 0, float32 {}\n"
    old = f"{head}{crossing.format(96, 16)}  rank 0: 0F0 0F1\n"
    new = f"{head}{crossing.format(80, 12)}  rank 0: 0F1 0F0\n"
    assert changes(old, new) == [
        "stage 0, forward to stage 1 changed: 2 tensors, 96 bytes -> 2 tensors, 80 bytes",
        "stage 0, forward to stage 1, a of stage 0 again changed: float32 16 -> float32 12",
        "rank 0 changed: 0F0 0F1 -> 0F1 0F0",
    ]
    assert changes(old, old.replace("  rank 0: 0F0 0F1\n", "")) == ["rank 0 changed: 0F0 0F1 -> none"]
