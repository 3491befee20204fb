"""Searches for trials that show a fault of a pass, until the time is over; each find is made small.

First come small programs with one thing each that a pass may trip over, then rounds of what is drawn, and between them small
programs with one option each. A round is a run of hypothesis with some of the kinds of steps left out: what hides behind a
fault that nearly every program has comes up in rounds that lack what this fault needs. Every other round looks for nothing
but the worst kinds. A round makes small what it finds first; known finds are passed over.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pytest_fxbucket.fuzz import strategies, training_steps
from pytest_fxbucket.fuzz.drawing import DrawingStep
from pytest_fxbucket.fuzz.finds import PLAN, TWICE, VALUES, Find
from pytest_fxbucket.fuzz.judge import judged
from pytest_fxbucket.fuzz.small_programs import sweeps
from pytest_fxbucket.fuzz.smaller import smaller
from pytest_fxbucket.fuzz.strategies import NAMES, TRAINING, drawn
from pytest_fxbucket.fuzz.trial import PlanChoice, Trial
from pytest_fxbucket.fuzz.tried_pass import TriedPass

_EXAMPLES = 40
_SHRINKING_S = 20.0
_IDLE = 40
"""After so many trials without one of fewer steps a round ends: by then hypothesis only tries other values for steps."""
_TRAINING = 3
"""For our pass, one round in so many draws whole training steps, whose work crosses iterations."""
_LAUNCHING = (
    *("gather", "reduce", "all_reduce", "coalesced", "gather_into", "all_reduce_in_place", "cast_and_launch"),
    *("all_to_all", "broadcast", "accumulate", "symbolic"),
)
Draws = tuple[list[DrawingStep], PlanChoice, str]
"""What hypothesis drew: steps, plan and options, and the prefix of all module names."""


class _Over(BaseException):
    """Ends a round. A BaseException, so that hypothesis does not take it for a failure of the program."""


@dataclass
class Search:
    """Finds against ``subject`` on programs of ``ranks`` ranks."""

    subject: TriedPass
    ranks: int
    number: int
    """The seed."""
    until: float
    """``time.monotonic()`` at which it ends."""
    say: Callable[[str], None] = lambda _: None
    known: list[Find] = field(default_factory=list)
    enough: int = 50
    """Finds that end it, as far as its caller is concerned."""
    check: Callable[[], None] = lambda: None
    """Called before each trial; what it raises ends the search."""
    tried: int = 0
    """Trials that were judged."""
    _best: tuple[Draws, Find] | None = None
    _shrink_until: float = 0.0
    _idle: int = 0

    def finds(self) -> Iterator[tuple[Trial, Find]]:
        """Each find that is not known, with the smallest trial that shows it."""
        number, swept = 0, sweeps(self.ranks, self.subject)
        while time.monotonic() < self.until:
            yield from self.look_at(next(swept, iter(())))
            self._round(number)
            number += 1
            if self._best is None:
                continue
            (steps, chosen, inside), find = self._best
            yield self._cut_short(self.trial(steps, chosen, inside), find)

    def look_at(self, trials: Iterator[Trial]) -> Iterator[tuple[Trial, Find]]:
        """Each find of ``trials`` that is not known, with a small trial; all are judged before one is cut short."""
        met: list[tuple[Trial, Find]] = []
        for trial in trials:
            self.check()
            if time.monotonic() > self.until or len(met) >= self.enough:
                break
            self.tried += 1
            if self.tried % _EXAMPLES == 0:
                self.say(f"{self.tried} tried, {len(self.known)} found")
            find = judged(trial, self.subject, self._last(TWICE, met))
            if find is not None and not find.is_of([*self.known, *(one for _, one in met)]):
                met.append((trial, find))
        for number, (trial, find) in enumerate(met):
            if not find.is_of(self.known):
                # A find gets its share of half the time left, at most _SHRINKING_S: _same ends so long after _shrink_until.
                now = time.monotonic()
                share = (self.until - now) / (2 * (len(met) - number))
                self._shrink_until = now - _SHRINKING_S + max(0.0, min(_SHRINKING_S, share))
                yield self._cut_short(trial, find)

    def _cut_short(self, trial: Trial, find: Find) -> tuple[Trial, Find]:
        self.say(f"{self.tried} tried; cutting short: {find.kind}")
        trial, find = smaller(trial, find, self._same)
        self.known.append(find)
        return trial, find

    def _last(self, kind: str, met: Sequence[tuple[Trial, Find]] = ()) -> str:
        """``kind``, or the one before TWICE if that was found already: a second run of the pass in each trial takes time."""
        found = [*self.known, *(one for _, one in met)]
        return PLAN if kind == TWICE and any(one.kind == TWICE for one in found) else kind

    def trial(self, steps: Sequence[DrawingStep], chosen: PlanChoice, inside: str) -> Trial:
        """What hypothesis drew, as a trial."""
        return chosen.trial(drawn(self.ranks, steps, inside))

    def _round(self, number: int) -> None:
        self._best = None
        chance = random.Random(f"{self.number} {number}")
        last = self._last(TWICE if number % 2 else VALUES)
        most, reach = chance.choice((8, 16, 44)), chance.choice((1, 3, 5, 11))
        names, plans = _some(chance), strategies.plans(self.subject, wrong=last != VALUES)
        if self.subject.is_ours and number % _TRAINING == 0:
            names, plans, most = _some(chance, TRAINING, training_steps.FIRST), strategies.crossing, min(most, 16)
        self.say(f"{self.tried} tried, {len(self.known)} found")

        @seed(chance.getrandbits(32))
        @settings(
            max_examples=_EXAMPLES,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @given(
            strategies.steps(names, 2, most, reach),
            plans,
            st.sampled_from(strategies.INSIDE),
        )
        def look(steps: list[DrawingStep], chosen: PlanChoice, inside: str) -> None:
            self._look(steps, chosen, inside, last)

        try:
            look()
        except (_Over, _FoundError):
            pass
        except Exception:
            # hypothesis may raise an error of its own, as for a flaky test; with a find at hand it does not matter.
            if self._best is None:
                raise

    def _look(self, steps: list[DrawingStep], chosen: PlanChoice, inside: str, last: str) -> None:
        # hypothesis draws until one trial fails and then shrinks it, by calling this again and again. The best so far is kept
        # here too, since _Over ends its run without a result. While shrinking only the signature of the first find counts, or
        # the round would slip from one fault to another.
        self.check()
        self._idle += 1
        if time.monotonic() > (self._shrink_until if self._best else self.until) or (self._best and self._idle > _IDLE):
            raise _Over
        trial = self.trial(steps, chosen, inside)
        self.tried += 1
        find = judged(trial, self.subject, last)
        if find is None or find.is_of(self.known):
            return
        if self._best is None:
            self._shrink_until = time.monotonic() + _SHRINKING_S
        elif find.signature != self._best[1].signature:
            return
        if self._best is None or len(steps) < len(self._best[0][0]):
            self._idle = 0
        # Of equal size the later one is taken: hypothesis goes on to smaller numbers.
        if self._best is None or _size(steps, chosen) <= _size(self._best[0][0], self._best[0][1]):
            self._best = (steps, chosen, inside), find
        raise _FoundError(find.kind)

    def _same(self, trial: Trial, find: Find) -> Find | None:
        """What the smaller ``trial`` shows, if that is ``find`` again; else None."""
        self.check()
        if time.monotonic() > self._shrink_until + _SHRINKING_S:
            return None
        found = judged(trial, self.subject, find.kind)
        # With less in it, the trial may come to show what is known already.
        return found if found is not None and found.signature == find.signature and not found.is_of(self.known) else None


class _FoundError(Exception):
    """The failure that hypothesis sees, and makes small."""


def _size(steps: Sequence[DrawingStep], chosen: PlanChoice) -> tuple[int, int]:
    return len(steps), len(repr(chosen))


def _some(chance: random.Random, names: Sequence[str] = NAMES, launching: Sequence[str] = _LAUNCHING) -> list[str]:
    """Kinds of steps for one round, some of ``names``, each as often as there; one of ``launching`` is among them."""
    chosen = {name for name in dict.fromkeys(names) if chance.random() < chance.choice((0.3, 0.6, 1.0))}
    chosen |= {chance.choice(launching), "module", "nothing"}
    assert chosen <= set(names)
    return [name for name in names if name in chosen]
