"""Step times of two variants that took turns, as a busy machine gives them: drawn, with a seed."""

from __future__ import annotations

import math
from random import Random

from pytest_fxbucket.bench.stats import Samples


def turns(
    seed: int, change: float, sets: int = 5, rounds: int = 30, between: float = 0.005, noise: float = 0.04
) -> tuple[Samples, Samples]:
    """(new, old): new takes `change` longer (0.05: five per cent).

    Each sample has lognormal noise of `noise`; three per cent of rounds begin a burst that slows both for up to 15 rounds; one
    sample of a hundred is up to 50 times slower; and in each set of processes new / old is off by about `between`.
    """
    draw = Random(seed)
    both = [_set(draw, change, rounds, between, noise) for _ in range(sets)]
    return tuple(new for new, _ in both), tuple(old for _, old in both)


def _set(draw: Random, change: float, rounds: int, between: float, noise: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    offsets = [math.log1p(change) + draw.gauss(0, between / math.sqrt(2)), draw.gauss(0, between / math.sqrt(2))]
    sides: tuple[list[float], list[float]] = ([], [])
    left, slow = 0, 0.0
    for _ in range(rounds):
        if left == 0 and draw.random() < 0.03:
            left = draw.randrange(15)
        slow = abs(draw.gauss(0, 0.4)) if left else 0.0
        left -= left > 0
        for side, offset in zip(sides, offsets, strict=True):
            value = offset + draw.gauss(0, noise) + slow * draw.uniform(0.7, 1.3)
            value += 4 * draw.random() if draw.random() < 0.01 else 0
            side.append(0.01 * math.exp(value))
    return tuple(sides[0]), tuple(sides[1])
