"""A model that is fed otherwise each time: what the zoo must find."""

from __future__ import annotations

from itertools import count

import torch
from torch import Generator, Tensor

from suites.zoo.draws import mean_square
from suites.zoo.odd_modules import DIM, stack
from suites.zoo.shelf import Shelf

SHELF = Shelf("odd", __name__)
_CALLS = count(1)


def drifting(generator: Generator) -> tuple[Tensor]:
    return (torch.randn(4, DIM, generator=generator) * next(_CALLS),)


SHELF.add("drifting", stack, drifting, mean_square)
