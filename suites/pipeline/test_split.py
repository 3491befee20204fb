"""Stages run one after the other as the model does, bit for bit: outputs, gradients, buffers, random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_fxbucket.compat.tracing import without_onednn
from pytest_fxbucket.pipeline import Stages, split_stages
from suites.pipeline.running import assert_bits, eagerly
from suites.pipeline.stage_models import SPLITS


def built(name: str) -> tuple[nn.Module, object, Stages]:
    torch.manual_seed(0)
    model, batch = SPLITS[name].build(), SPLITS[name].batch()
    return model, batch, split_stages(model, SPLITS[name].cuts, batch)


@pytest.mark.parametrize("name", SPLITS)
def test_stages_are_the_model_bit_for_bit(name: str) -> None:
    model, batch, stages = built(name)
    assert len(stages) == len(SPLITS[name].cuts) + 1
    with without_onednn():  # as a step is traced: recurrent layers run as what they compute
        eager = eagerly(model, batch)
    assert_bits(stages, model, batch, eager)
