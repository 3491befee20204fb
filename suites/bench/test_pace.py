"""When warm-up ends and when samples are enough: decided from samples and a clock that all ranks share."""

from __future__ import annotations

import math
from random import Random

import pytest

from pytest_fxbucket.bench.stats import WINDOW, Pacing, half_width, has_settled, is_enough, is_warm


def noisy(random: Random, rounds: int, spread: float) -> list[float]:
    return [math.exp(random.gauss(0.0, spread)) for _ in range(rounds)]


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.2])
def test_steps_that_only_scatter_have_settled(spread: float) -> None:
    random = Random(1)
    settled = [has_settled({"a": noisy(random, 2 * WINDOW, spread)}) for _ in range(200)]
    assert sum(settled) >= 170


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.05])
def test_steps_that_become_a_third_faster_have_not(spread: float) -> None:
    random = Random(1)
    falling = [[*(1.5 * one for one in noisy(random, WINDOW, spread)), *noisy(random, WINDOW, spread)] for _ in range(200)]
    assert sum(has_settled({"a": [1.0] * 2 * WINDOW, "b": rounds}) for rounds in falling) <= 10


def test_warm_up_takes_a_third_of_the_time_at_most_and_two_windows_at_least() -> None:
    falling = [2.0**-number for number in range(2 * WINDOW)]
    assert not is_warm({"a": falling}, 9.9, Pacing(30, 0.01))
    assert is_warm({"a": falling}, 10.0, Pacing(30, 0.01))
    assert not is_warm({"a": falling[1:]}, 1000.0, Pacing(30, 0.01))


def test_samples_are_enough_when_the_ratio_is_known_or_the_time_is_over() -> None:
    random = Random(1)
    pacing = Pacing(30, 0.02, least_rounds=8)
    few, many = ({"a": noisy(random, count, 0.05), "b": noisy(random, count, 0.05)} for count in (16, 1000))
    assert half_width(few) > 0.02 > half_width(many)
    assert not is_enough(few, 29.9, pacing)
    assert is_enough(few, 30.0, pacing)
    assert is_enough(many, 0.1, pacing)
    assert not is_enough({name: rounds[:7] for name, rounds in few.items()}, 1000.0, pacing)
    assert not is_enough(many, 29.9, Pacing(30, 0.0, least_rounds=8))


def test_noise_that_hits_both_variants_of_a_round_alike_leaves_their_ratio_known() -> None:
    burst = noisy(Random(1), 40, 0.5)
    assert half_width({"a": burst, "b": [2 * one for one in burst]}) < 1e-12
    assert half_width({"a": burst}) == 0.0
