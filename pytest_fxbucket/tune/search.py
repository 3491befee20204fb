"""Climbs from a plan to better ones, one move after the other, as long as there is time. Knows nothing of graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, Protocol

from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.tune.moves import PlanMove, key_of

LEAST = 0.001
"""Share of the step time that a change must win; a smaller gain is within the error of the simulation."""
Ended = Literal["", "time", "stopped"]
"""Why a search ended, in this order: nothing was left to try; the time was over; somebody pressed Ctrl-C."""


@dataclass(frozen=True, slots=True)
class SimulatedScore:
    """The figures of a simulated step by which plans are compared."""

    seconds: float
    exposed: float
    peak_bytes: int
    reasons: Mapping[str, float] = field(default_factory=dict)
    """Seconds of exposure by reason."""


class Scorer(Protocol):
    """Simulates plans."""

    def score(self, plan: Plan) -> SimulatedScore:
        """Simulate ``plan``. Raises FxbucketError for a plan that cannot be simulated."""
        ...

    def effort(self, plan: Plan) -> float:
        """How much work scoring ``plan`` is, relative to others, above 0; not measured, so that the order of tries is fixed."""
        ...

    def takes(self, plan: Plan) -> float:
        """Seconds that scoring ``plan`` is likely to take."""
        ...

    def moves(self, plan: Plan) -> Sequence[PlanMove]:
        """Moves from ``plan``, which was scored last or is the best so far."""
        ...


@dataclass(frozen=True, slots=True)
class KeptMove:
    """A move that was kept."""

    says: str
    gain: float
    """Seconds of the step."""
    score: SimulatedScore


@dataclass(slots=True)
class BestPlan:
    """The best plan so far, and the changes that led to it."""

    plan: Plan
    first: SimulatedScore
    score: SimulatedScore
    limit: float
    """Bytes that a rank may hold."""
    changes: list[KeptMove] = field(default_factory=list)
    tried: int = 0
    """Plans that were simulated, beside the first."""
    refused: int = 0
    """Plans that could not be simulated."""
    ended: Ended = ""


def search(
    plan: Plan,
    scorer: Scorer,
    limit: float,
    time_left: Callable[[], float] = lambda: inf,
    say: Callable[[str], None] = lambda _: None,
) -> BestPlan:
    """Climb from ``plan``: the first move that is better is kept, and moves that promise most for their effort are tried first.

    While the best plan is above ``limit`` bytes, only one that exceeds it by less is better. Raises FxbucketError if ``plan``
    itself cannot be simulated. A KeyboardInterrupt passes through until ``plan`` is simulated; after that it ends the search.
    """
    say("simulating the plan as it is")
    first = scorer.score(plan)
    found = BestPlan(plan, first, first, limit)
    # Moves also lead back to plans that were tried before; none is tried again.
    known: set[str] = {key_of(plan)}
    often: Counter[str] = Counter()
    try:
        while (move := _next(found, scorer, known, often, time_left)) is not None:
            known.add(key_of(move.plan))
            often[move.kind] += 1
            say(
                f"plan {found.tried + found.refused + 2}: {move.says}; the best so far takes "
                f"{1000 * found.score.seconds:,.3f} ms, the plan as it is {1000 * first.seconds:,.3f} ms"
            )
            try:
                score = scorer.score(move.plan)
            except FxbucketError:  # the model or the pass refuses this plan; the search goes on
                found.refused += 1
                continue
            found.tried += 1
            if is_better(score, found.score, limit, move.takes_back):
                found.changes.append(KeptMove(move.says, found.score.seconds - score.seconds, score))
                found.plan, found.score = move.plan, score
    except KeyboardInterrupt:
        found.ended = "stopped"
    return found


def is_better(new: SimulatedScore, old: SimulatedScore, limit: float, takes_back: bool = False) -> bool:
    """Whether ``new`` is to be preferred; with ``takes_back`` it need only be as good."""
    # Below 0, so that an equal time passes the comparison at the end, which is strict.
    least = -LEAST / 10 if takes_back else LEAST
    above, before = max(0.0, new.peak_bytes - limit), max(0.0, old.peak_bytes - limit)
    if above != before:
        return above < before
    return new.seconds < old.seconds * (1 - least)


def _next(
    found: BestPlan, scorer: Scorer, known: set[str], often: Mapping[str, int], time_left: Callable[[], float]
) -> PlanMove | None:
    """The most promising move that was not tried and for which there is time; None if there is none, and ``found`` says why."""
    late = False
    new = [move for move in scorer.moves(found.plan) if key_of(move.plan) not in known]
    for move in _promising(new, found.score, scorer, often):
        if scorer.takes(move.plan) <= time_left():
            return move
        # Another one may still be in time, as one that needs no capture of its own.
        late = True
    found.ended = "time" if late else ""
    return None


def _promising(moves: Sequence[PlanMove], score: SimulatedScore, scorer: Scorer, often: Mapping[str, int]) -> list[PlanMove]:
    """``moves`` sorted by possible gain for the effort, equal ones by effort, then as given.

    The possible gain is the exposure for the reasons that a move helps. A move of a kind that was tried often counts as more
    effort, so that every kind has its turn even if there is no time for all moves.
    """

    def rank(move: PlanMove) -> tuple[float, float]:
        effort = scorer.effort(move.plan) * (1 + often.get(move.kind, 0))
        return -sum(score.reasons.get(why, 0.0) for why in move.helps) / effort, effort

    return sorted(moves, key=rank)
