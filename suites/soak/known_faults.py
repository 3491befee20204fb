"""How many of the known faults of torch's manual pass ``fxbucket fuzz`` finds, `N of M`, with the names of the others.

A fault of suites/passes/partings.py is found if a find says the same of the pass, and needs no more than the table's graph has.
Of another pass M is on how many of the table's graphs it is not well.

``python -m suites.soak.known_faults [--seconds 300] [--seed 0] [--pass torch]``
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence

from pytest_fxbucket.fuzz.finds import PLAN, Find
from pytest_fxbucket.fuzz.judge import judged
from pytest_fxbucket.fuzz.search import Search
from pytest_fxbucket.fuzz.trial import Trial
from pytest_fxbucket.fuzz.tried_pass import TriedPass, subject_of
from suites.passes.partings import PARTINGS, Parting

WRONG = {
    "an entry that matches no module",
    "an empty entry",
    "a string in place of a list of entries",
    "a graph without module names",
    "an unknown bucket_mode",
}


def trial_of(parting: Parting) -> Trial:
    """The graph and the plan of ``parting``."""
    program = parting.program()
    options = {} if parting.mode is None else {"bucket_mode": parting.mode}
    name = parting.name.replace("`", "")
    return Trial(program, program.returns(*parting.build(program)), parting.plan, options, name if name in WRONG else "")


def known_faults(subject: TriedPass) -> dict[str, Find]:
    """What there is to find on the table's graphs, by name."""
    partings = [one for one in PARTINGS if subject.takes_plan or (one.launches and one.mode is None)]
    found = {one.name: judged(trial_of(one), subject, PLAN) for one in partings}
    return {name: find for name, find in found.items() if find is not None}


def missing(subject: TriedPass, finds: Iterable[Find]) -> list[str]:
    """Names of known faults that none of ``finds`` is."""
    finds = list(finds)
    return [name for name, fault in known_faults(subject).items() if not fault.is_of(finds)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Search and tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pass", dest="name", default="torch")
    given = parser.parse_args(arguments)
    subject, begin = subject_of(given.name), time.monotonic()
    search = Search(subject, 2, given.seed, begin + given.seconds)
    for number, _ in enumerate(search.finds(), 1):
        print(f"{time.monotonic() - begin:6.1f} s: {number} finds, {len(missing(subject, search.known))} missing", flush=True)
    left, faults = missing(subject, search.known), known_faults(subject)
    for name in left:
        print(f"not found: {name}: {faults[name].kind}: {faults[name].says}")
    print(
        f"{given.name}: {len(faults) - len(left)} of {len(faults)} known faults found in {search.tried} programs, "
        f"{len(search.known)} finds, {time.monotonic() - begin:.0f} s, seed {given.seed}"
    )


if __name__ == "__main__":
    main()
