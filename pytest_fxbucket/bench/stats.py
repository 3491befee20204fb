"""Samples of step time, when there are enough of them, and how much slower one variant is than another.

The answer has the interval that noise leaves, by a hierarchical, smoothed bootstrap.

The estimate is the logarithm of a ratio of step times. In one set of processes it is the midmean (the mean of the middle
half) over rounds of log(new / old), so that a burst that hits both variants cancels out and one that hits a single round is cut
off; over sets it is the mean. The interval is the percentile interval of resamples (Efron & Tibshirani, An Introduction to the
Bootstrap, 1993, ch. 13), drawn as the noise is nested (Davison & Hinkley, Bootstrap Methods and their Application, 1997, 3.8;
Kalibera & Jones, Rigorous Benchmarking in Reasonable Time, ISMM 2013):

- sets of processes with replacement, since processes differ from each other by the layout of their memory alone; deviations
  from their mean are stretched by sqrt(n / (n - 1)), as n sets vary less than what they are drawn from;
- in a set, blocks of rounds that follow each other, since the noise of machines comes in bursts (Künsch 1989; in a circle, so
  that no round counts less than others: Politis & Romano 1992);
- to each set drawn, normal noise is added (smoothed bootstrap: Efron & Tibshirani, 16.5), since two to five sets, let alone
  one, cannot show by themselves how much processes differ: half a per cent is taken for granted.

The same data give the same answer: the generator is seeded, and is Python's own. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from random import Random
from statistics import NormalDist, fmean, median

from pytest_fxbucket.errors import BenchmarkError

Samples = tuple[tuple[float, ...], ...]
"""Of one variant: seconds of the slowest rank, one a round, for each set of processes in turn."""

LEAST_S, MOST_S = 1e-9, 1e6
"""The range of seconds that a step can take: a sample outside of it was not measured."""


@dataclass(slots=True)
class Series:
    """Samples of variants that took turns in the same processes: round r of all of them ran right after one another."""

    samples: dict[str, Samples] = field(default_factory=dict)
    """By the variant's name: unbucketed, bucketed, or a pass. All have equally many rounds in each set of processes."""
    warmup_rounds: tuple[int, ...] = ()
    """Rounds before the first sample, of each set of processes."""
    is_stable: bool = True
    """Whether step time settled before sampling began, in every set of processes."""
    has_priority: bool = True
    """Whether all ranks ran before everything else on the machine."""
    peak_bytes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By variant the largest resident size of each rank's process during a step; on a GPU, the memory of the rank's tensors."""

    def add_set(
        self,
        samples: Mapping[str, Sequence[float]],
        warmup_rounds: int,
        is_stable: bool,
        has_priority: bool,
        peak_bytes: Mapping[str, Sequence[int]],
    ) -> None:
        """Add what variants took in one more set of processes."""
        for name, rounds in samples.items():
            self.samples[name] = (*self.samples.get(name, ()), tuple(rounds))
            peaks = zip(self.peak_bytes.get(name, peak_bytes[name]), peak_bytes[name], strict=True)
            self.peak_bytes[name] = tuple(map(max, peaks))
        self.warmup_rounds += (warmup_rounds,)
        self.is_stable &= is_stable
        self.has_priority &= has_priority

    def all_of(self, variant: str) -> list[float]:
        """Seconds of every round of ``variant``, in the order in which they ran."""
        return [sample for rounds in self.samples[variant] for sample in rounds]


WINDOW = 4
"""How many of the last rounds are compared, by their median, with as many before them."""
_SETTLED = 0.02  # a fall by a smaller share of the step is none
_STANDARD_ERRORS = 2
_MAD_TO_SIGMA = 1.4826  # standard deviation by median absolute deviation, of normal samples
_MEDIAN_TO_MEAN = math.sqrt(math.pi / 2)
"""How much wider a median scatters than a mean, of normal samples."""
_Z = NormalDist().inv_cdf(0.995)  # half of a two-sided 99 % interval, in standard errors


@dataclass(frozen=True, slots=True)
class Pacing:
    """How long one set of processes goes on."""

    budget_s: float
    """Seconds for warm-up and samples together, of which warm-up gets a third at most."""
    precision: float
    """Sampling ends when the interval of each log ratio of two variants has this half width; 0: the whole budget is used."""
    least_rounds: int = 8
    """How many rounds are sampled at least, even if they take longer than the budget."""


def has_settled(samples: Mapping[str, Sequence[float]]) -> bool:
    """Whether no variant was faster in its last rounds than in those before, beyond noise.

    Only a fall counts, since the costs of starting up only ever fall.
    """
    return all(len(rounds) >= 2 * WINDOW and not _falls(rounds[-2 * WINDOW :]) for rounds in samples.values())


def _falls(rounds: Sequence[float]) -> bool:
    """Whether the median of the second half lies below that of the first by more than both scatter."""
    first, last = rounds[:WINDOW], rounds[WINDOW:]
    # The noise is two standard errors of a difference of medians: sigma from the median deviation, widened from means to
    # medians, over WINDOW samples on either side.
    scatter = median(abs(one - median(half)) for half in (first, last) for one in half)
    noise = _STANDARD_ERRORS * _MEDIAN_TO_MEAN * _MAD_TO_SIGMA * scatter * math.sqrt(2 / WINDOW)
    return median(first) - median(last) > max(_SETTLED * median(first), noise)


def is_warm(samples: Mapping[str, Sequence[float]], elapsed_s: float, pacing: Pacing) -> bool:
    """Whether warm-up ends, because step time has settled or because its share of the budget is used up."""
    rounds = len(next(iter(samples.values())))
    return has_settled(samples) or (elapsed_s >= pacing.budget_s / 3 and rounds >= 2 * WINDOW)


def is_enough(samples: Mapping[str, Sequence[float]], elapsed_s: float, pacing: Pacing) -> bool:
    """Whether sampling ends; ``elapsed_s`` counts from the start of warm-up."""
    if len(next(iter(samples.values()))) < pacing.least_rounds:
        return False
    return elapsed_s >= pacing.budget_s or half_width(samples) <= pacing.precision


def half_width(samples: Mapping[str, Sequence[float]]) -> float:
    """Half width of the 99 % interval of the median log ratio of two variants, the widest of all pairs; 0 for one variant.

    Rounds are paired. It is a normal approximation with the median absolute deviation as scale, good enough to decide when to
    stop.
    """
    widths = []
    for one, other in combinations(samples.values(), 2):
        ratios = [math.log(a / b) for a, b in zip(one, other, strict=True)]
        middle = median(ratios)
        sigma = _MAD_TO_SIGMA * median(abs(ratio - middle) for ratio in ratios)
        widths.append(_Z * _MEDIAN_TO_MEAN * sigma / math.sqrt(len(ratios)))
    return max(widths, default=0.0)


PROCESS_SPREAD = 0.005
"""Standard deviation of log(new / old) between sets of processes that is taken for granted."""
_RESAMPLES = 2000
_OF_A_SET = (50, 200)  # resamples of each set of processes: fewest, and most
_WORK = 200_000  # about how many samples are drawn for all of these, which keeps long series quick


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio of step times, as a natural logarithm, and the interval that holds it with ``confidence``."""

    log_ratio: float
    low: float
    high: float
    confidence: float

    def __post_init__(self) -> None:
        """Raise BenchmarkError for nan and infinity: every comparison with nan is false, so it would read as no difference."""
        if not all(map(math.isfinite, (self.log_ratio, self.low, self.high))):
            raise BenchmarkError(f"a ratio of step times of {self.log_ratio} from {self.low} to {self.high} is no number")

    @property
    def ratio(self) -> float:
        """New time by old time."""
        return math.exp(self.log_ratio)

    @property
    def half_width(self) -> float:
        """Half of the interval, of the logarithm; 0.01 is about one per cent."""
        return (self.high - self.low) / 2

    def is_slower(self, threshold: float) -> bool:
        """Whether new is slower by more than ``threshold`` (0.03: three per cent), and than noise."""
        return self.log_ratio > math.log1p(threshold) and self.low > 0

    def is_faster(self, threshold: float) -> bool:
        """Whether old is slower than new by more than ``threshold``, and than noise."""
        return -self.log_ratio > math.log1p(threshold) and self.high < 0

    def __str__(self) -> str:
        change, low, high = (f"{math.expm1(each):+.1%}" for each in (self.log_ratio, self.low, self.high))
        return f"{change} ({self.confidence:.0%} interval {low} to {high})"


def ms(seconds: float | None) -> str:
    """``seconds`` in milliseconds, to the microsecond; a dash if it was not measured."""
    return "-" if seconds is None else f"{seconds * 1e3:,.3f} ms"


def ratio_of(
    new: Samples, old: Samples, *, confidence: float = 0.99, seed: int = 0, process_spread: float = PROCESS_SPREAD
) -> Estimate:
    """log(new / old) of two variants that took turns: round r of each ran right after the other's, in the same processes.

    Raises BenchmarkError if they differ in sets or rounds, if there are none, or for seconds that no step takes.
    """
    draws = _Draws(_log_ratios(new, old), process_spread)
    return _estimate(draws.centre, draws.some(Random(seed)), confidence)


def ratio_between(run_a: tuple[Samples, Samples], run_b: tuple[Samples, Samples]) -> Estimate:
    """log((num_b / den_b) / (num_a / den_a)) of two runs, each (num, den) of variants that took turns; 99 % sure.

    A change of the machine's speed between the runs cancels out. The runs are resampled independently of each other. Raises
    BenchmarkError as ``ratio_of`` does.
    """
    random = Random(0)
    a, b = (_Draws(_log_ratios(*run), PROCESS_SPREAD) for run in (run_a, run_b))
    differences = [of_b - of_a for of_a, of_b in zip(a.some(random), b.some(random), strict=True)]
    return _estimate(b.centre - a.centre, differences, 0.99)


def midmean(values: Sequence[float]) -> float:
    """Mean of the middle half: efficient for normal noise, not moved by outliers. For three values or fewer the median."""
    cut = (len(values) - 1) // 2 if len(values) < 4 else len(values) // 4
    middle = sorted(values)[cut : len(values) - cut]
    return fmean(middle)


class _Draws:
    """Resamples of the mean over sets of each set's midmean."""

    def __init__(self, rounds_of_sets: Sequence[Sequence[float]], process_spread: float) -> None:
        self._rounds, self._spread = rounds_of_sets, process_spread
        self._means = [midmean(rounds) for rounds in rounds_of_sets]
        self.centre = fmean(self._means)

    def some(self, random: Random) -> list[float]:
        """Draw ``_RESAMPLES`` resamples of the mean over sets."""
        # Midmeans of resampled rounds cost most, so a pool of them is made for each set, from which all resamples draw.
        count = len(self._rounds)
        most = _WORK // sum(map(len, self._rounds))
        each = min(max(most, _OF_A_SET[0]), _OF_A_SET[1])
        pools = [[midmean(_blocks(rounds, random)) for _ in range(each)] for rounds in self._rounds]
        stretch = math.sqrt(count / (count - 1)) if count > 1 else 1.0
        drawn = []
        for _ in range(_RESAMPLES):
            total = 0.0
            for _ in range(count):
                at = int(random.random() * count)
                # Three sources of noise: which sets ran, which rounds ran in them, and how processes differ beyond these sets.
                of_set = self.centre + stretch * (self._means[at] - self.centre)
                total += of_set + (pools[at][int(random.random() * each)] - self._means[at]) + random.gauss(0.0, self._spread)
            drawn.append(total / count)
        return drawn


def _blocks(rounds: Sequence[float], random: Random) -> list[float]:
    """A resample of equally many rounds, drawn as blocks of consecutive rounds that may begin anywhere.

    A block that reaches past the last round goes on with the first.
    """
    count = len(rounds)
    # A block of the cube root of the rounds is best for the variance of a mean (Hall, Horowitz & Jing 1995).
    length = math.ceil(count ** (1 / 3))
    circle = [*rounds, *rounds[: length - 1]]
    drawn: list[float] = []
    while len(drawn) < count:
        at = int(random.random() * count)
        drawn += circle[at : at + length]
    return drawn[:count]


def _log_ratios(new: Samples, old: Samples) -> list[list[float]]:
    shapes = [[len(rounds) for rounds in samples] for samples in (new, old)]
    if shapes[0] != shapes[1]:
        raise BenchmarkError(f"variants that took turns have as many rounds each, and these have {shapes[0]} and {shapes[1]}")
    if not shapes[0] or 0 in shapes[0]:
        raise BenchmarkError("a step time cannot be compared without a round in every set of processes")
    for sample in (sample for samples in (new, old) for rounds in samples for sample in rounds):
        if not LEAST_S <= sample <= MOST_S:
            raise BenchmarkError(f"a step took {sample} s; expected a positive number of seconds, {LEAST_S:g} to {MOST_S:g}")
    return [[math.log(n) - math.log(o) for n, o in zip(*pair, strict=True)] for pair in zip(new, old, strict=True)]


def _estimate(centre: float, drawn: list[float], confidence: float) -> Estimate:
    if not 0 < confidence < 1:
        raise BenchmarkError(f"a confidence of {confidence} cannot be had; expected one between 0 and 1, such as 0.99")
    drawn.sort()
    tail = (1 - confidence) / 2
    low, high = _quantile(drawn, tail), _quantile(drawn, 1 - tail)
    # Resamples need not lie around the estimate, as a midmean is not linear, but the interval must hold it.
    return Estimate(centre, min(low, centre), max(high, centre), confidence)


def _quantile(ordered: Sequence[float], part: float) -> float:
    """Interpolated between the two nearest; ``ordered`` ascends."""
    at = part * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])
