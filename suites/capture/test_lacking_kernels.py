"""What eager torch cannot run either is said so, and not put down to tracing."""

from __future__ import annotations

import pytest
import torch

from pytest_fxbucket.capture.blame import blamed
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.errors import CaptureError


def test_a_histogram_of_integers_is_told_from_what_tracing_cannot_do() -> None:
    """As a router of experts makes it, which GPUs run and CPUs do not."""
    counts = torch.arange(4)
    with pytest.raises(NotImplementedError):
        torch.histc(counts, bins=2)
    said = (
        r'^tracing module router failed at .*: torch has no "histogram_cpu" for int64, eagerly neither; cast .* x\.float\(\)$'
    )
    mode = FakeTensorMode()
    with pytest.raises(CaptureError, match=said), blamed(lambda: "tracing module router"), mode:
        torch.histc(mode.from_tensor(counts), bins=2)
