"""Estimates of a change in step time: no false alarm, none slept through, nothing left to luck; and pacing.

When warm-up ends and when samples are enough is decided from samples and a clock that all ranks share.
"""

from __future__ import annotations

import math
import subprocess
import sys
from random import Random

import pytest

from pytest_fxbucket.bench.stats import (
    WINDOW,
    Estimate,
    Pacing,
    Samples,
    half_width,
    has_settled,
    is_enough,
    is_warm,
    midmean,
    ratio_of,
)
from pytest_fxbucket.errors import BenchmarkError
from suites.bench.noise import turns
from suites.soak.estimates import THRESHOLD, estimates, scaled
from suites.soak.run import ESTIMATES


class TestNoise:
    def test_in_a_tenth_of_the_runs_of_the_soak_there_is_no_false_alarm_and_none_slept_through(self) -> None:
        assert list(estimates(ESTIMATES // 10, print)) == []

    def test_processes_that_differ_much_widen_the_interval(self) -> None:
        wide, narrow = (ratio_of(*turns(0, 0.0, between=each)) for each in (0.03, 0.0))
        assert wide.half_width > 1.5 * narrow.half_width

    def test_noise_in_bursts_widens_the_interval(self) -> None:
        burst = tuple(1.2 if 20 <= at < 70 else 1.0 + 0.01 * (at % 3) for at in range(100))
        mixed = tuple(burst[37 * at % 100] for at in range(100))
        flat = (tuple(1.0 for _ in range(100)),)
        assert ratio_of((burst,), flat).half_width > 1.5 * ratio_of((mixed,), flat).half_width


class TestCertainty:
    def test_the_same_samples_give_the_same_answer_in_another_process_and_another_seed_nearly_so(self) -> None:
        code = (
            "from suites.bench.noise import turns; from pytest_fxbucket.bench.stats import *; print(ratio_of(*turns(3, 0.05)))"
        )
        here = ratio_of(*turns(3, 0.05))
        there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert there.strip() == str(here)
        other = ratio_of(*turns(3, 0.05), seed=1)
        assert other.log_ratio == here.log_ratio
        assert other != here
        assert abs(other.low - here.low) < 0.1 * here.half_width

    def test_it_imports_no_torch(self) -> None:
        code = "import sys, pytest_fxbucket.bench.stats; sys.exit('torch' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_swapped_sides_give_the_opposite(self) -> None:
        new, old = turns(5, 0.1)
        there, back = ratio_of(new, old), ratio_of(old, new)
        assert there.log_ratio == pytest.approx(-back.log_ratio)
        assert (there.is_slower(THRESHOLD), back.is_faster(THRESHOLD)) == (True, True)

    def test_a_round_that_is_100_times_slower_changes_little(self) -> None:
        new, old = turns(8, 0.0)
        rounds = list(new[2])
        rounds[4] *= 100
        struck = (*new[:2], tuple(rounds), *new[3:])
        assert abs(ratio_of(struck, old).log_ratio - ratio_of(new, old).log_ratio) < 0.002

    @pytest.mark.parametrize("samples", [((2.0,),), ((2.0, 2.0),), ((2.0,) * 50,) * 3])
    def test_constants_are_known_but_for_what_processes_may_differ_by(self, samples: Samples) -> None:
        estimate = ratio_of(samples, scaled(samples, 0.5))
        assert estimate.ratio == pytest.approx(2.0)
        assert 0 < estimate.half_width < 0.02
        sure = ratio_of(samples, scaled(samples, 0.5), process_spread=0.0)
        assert sure.half_width == pytest.approx(0.0)

    def test_a_change_below_the_threshold_is_none_however_sure(self) -> None:
        sure = Estimate(math.log(1.02), 0.019, 0.021, 0.99)
        assert (sure.is_slower(0.03), sure.is_slower(0.01)) == (False, True)
        unsure = Estimate(math.log(1.05), -0.001, 0.1, 0.99)
        assert not unsure.is_slower(0.03)

    def test_it_is_written_as_people_read_it(self) -> None:
        assert str(Estimate(math.log(1.05), math.log(1.04), math.log(1.061), 0.99)) == "+5.0% (99% interval +4.0% to +6.1%)"


class TestBadSamples:
    @pytest.mark.parametrize("bad", [0.0, -1.0, 1e-10, 1e7, 10**400, float("nan"), float("inf")])
    def test_a_step_of_no_time_is_refused(self, bad: float) -> None:
        with pytest.raises(BenchmarkError, match=f"a step took {bad} s; expected a positive number"):
            ratio_of(((1.0, bad),), ((1.0, 1.0),))

    def test_steps_as_far_apart_as_can_be_are_compared(self) -> None:
        assert ratio_of(((1e6,),), ((1e-9,),)).log_ratio == pytest.approx(math.log(1e15))

    @pytest.mark.parametrize("at", range(3))
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_an_interval_that_is_no_number_is_an_error_and_no_pass(self, at: int, bad: float) -> None:
        values = [0.0, -0.1, 0.1]
        values[at] = bad
        with pytest.raises(BenchmarkError, match="is no number"):
            Estimate(*values, 0.99)
        with pytest.raises(BenchmarkError, match="is no number"):
            ratio_of(((1.0, 2.0),), ((1.0, 1.0),), process_spread=bad)

    def test_other_rounds_are_refused(self) -> None:
        with pytest.raises(BenchmarkError, match=r"as many rounds each, and these have \[1, 2\] and \[2, 1\]"):
            ratio_of(((1.0,), (1.0, 1.0)), ((1.0, 1.0), (1.0,)))

    @pytest.mark.parametrize("samples", [(), ((),), ((1.0,), ())])
    def test_no_rounds_are_refused(self, samples: Samples) -> None:
        with pytest.raises(BenchmarkError, match="without a round"):
            ratio_of(samples, samples)

    @pytest.mark.parametrize("confidence", [0.0, 1.0, -1.0, 99.0])
    def test_a_confidence_that_is_none_is_refused(self, confidence: float) -> None:
        with pytest.raises(BenchmarkError, match="expected one between 0 and 1"):
            ratio_of(((1.0,),), ((1.0,),), confidence=confidence)


def test_the_midmean_is_the_mean_of_the_middle_half() -> None:
    assert midmean([9, 1, 2, 3, 1000, -5, 4, 0]) == 2.5
    assert [midmean(values) for values in ([3], [1, 2], [1, 5, 100])] == [3, 1.5, 5]


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
