"""A stage as a module that takes one tensor and gives one, for engines that send no more than that."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pytest_fxbucket.pipeline.carrier import Carrier
from pytest_fxbucket.pipeline.stages import Stage


class Carried(nn.Module):
    """A stage between carriers: the first one takes the tensors of the batch, the last one gives what the model gives."""

    def __init__(self, stage: Stage, dtype: torch.dtype = torch.float32, dims: int = 1) -> None:
        super().__init__()
        self.stage = stage
        said = stage.summary
        self.received = Carrier(said.receives, dtype, dims) if said.index else None
        self.sent = Carrier(said.sends, dtype, dims) if not stage.is_last else None

    def forward(self, *received: torch.Tensor) -> Any:
        """Take a carrier, or on the first stage what the stage receives; give a carrier, or the model's result."""
        values = received if self.received is None else self.received.unpack(*received)
        given = self.stage(*values)
        return given if self.sent is None else self.sent.pack(given)
