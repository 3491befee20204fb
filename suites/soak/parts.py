"""The parts of the soak that run on ranks. Each prints lines as it goes, and gives its problems: a sentence each."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis.strategies import SearchStrategy

from pytest_fxbucket.fuzz.strategies import automatic, by_hand
from pytest_fxbucket.fuzz.trial import PlanChoice
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.ranks.pool import RankFailure, RankPool
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.fuzz.hunt import crossed, hunt, swept
from suites.ranks.fault_jobs import FAULTS, Fault
from suites.soak.probe import Holding

ROOT = Path(__file__).resolve().parents[2]
WORLD = 4
CHECKS = ("audit", "collectives", "same", "bitwise")
# What the allocators of Python and of the C library may keep of what went through; a leak of 40 KiB an item is far above.
_MEMORY_KIB = 16 << 10
_LATE_S = 1.0
_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGSTOP)

Say = Callable[[str], None]


def items(count: int, say: Say) -> Iterator[str]:
    """`count` pytest items in a row on one pool; all that is held is where it was, and how much each process's moved."""
    warm = max(6, count // 5)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pytest", "-p", "suites.soak.probe", "-p", "no:cacheprovider", "-qq", "--tb=short"]
        command += ["suites/soak/soak_items.py", f"--soak-items={count // 2}", f"--soak-warm={warm}", f"--soak-report={report}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        looks = json.loads(report.read_text()) if report.exists() else []
    if done.returncode or len(looks) != 2:
        yield f"the {count} items in a row ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
        return
    say(f"items: {count} of {count} in a row on one pool; since item {warm}, or when the server had imported all it will:")
    first, last = ({int(pid): Holding(**one) for pid, one in look.items()} for look in looks)
    if first.keys() != last.keys():
        yield f"other processes than before: {sorted(first.keys() ^ last.keys())}"
    for position, pid in enumerate(sorted(first.keys() & last.keys())):
        name = ("pytest", "server", *(f"rank {rank}" for rank in range(WORLD)))[position]
        moved = last[pid].since(first[pid])
        say(f"    {name:7} {moved}")
        if moved.memory_kib > _MEMORY_KIB or moved.descriptors or moved.threads:
            yield f"{name} holds more than it did {count - warm} items before: {moved}"


def verdicts(count: int, say: Say) -> Iterator[str]:
    """One plan, traced, passed and run on 4 ranks `count` times, with a new server every now and then; one verdict."""
    found: Counter[str] = Counter()
    pools = Pools()
    try:
        for turn in range(count):
            if turn and turn % max(2, count // 20) == 0:
                pools.close()
                pools = Pools()
            found[verdict(pools)] += 1
            if turn % 20 == 19:
                say(f"verdicts: {turn + 1} of {count}, {len(found)} different")
    finally:
        pools.close()
    say(f"verdicts: {count} of {count}, {len(found)} different: {found.most_common(1)[0][0]}")
    if len(found) != 1:
        yield f"{count} runs of one plan gave {len(found)} verdicts: " + "; ".join(
            f"{n} times {text}" for text, n in found.items()
        )


def verdict(pools: Pools) -> str:
    """All that the checks say of the plan, but for memory, and a digest of the bucketed graph."""
    (plan,) = load_plans(Path(__file__).with_name("small.toml"))
    with tempfile.TemporaryDirectory() as folder:
        run = PlanRun(plan, RunSettings(rootdir=ROOT, golden_dir=ROOT / "golden", artifacts=Path(folder)), pools)
        parts = []
        for name in CHECKS:
            one = run.check(name)
            parts.append(f"{name} {one.outcome} ({one.summary})" + "".join(f" / {line}" for line in one.lines))
        code = run.bucketed.graph_module.code
    text = ", ".join(parts) + ", graph " + hashlib.sha256(code.encode()).hexdigest()[:8]
    return re.sub(r"; largest rank \d+ MiB", "", text)


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault as the seed has it: a job of suites/ranks, or a signal after `delay_s` in the middle of collectives."""

    name: str
    culprit: int
    delay_s: float
    is_late: bool
    number: signal.Signals | None = None

    @property
    def limit_s(self) -> float:
        """Time limit of the job."""
        return _LATE_S if self.is_late else 120.0


def faults(times: int, seed: int, say: Say, kinds: Sequence[Fault] = FAULTS) -> Iterator[str]:
    """Each of `kinds`, and each signal, `times` times, in an order, on ranks and at moments that `seed` gives.

    The next job is well each time.
    """
    chance = random.Random(seed)
    strikes = [Strike(f.job, chance.randrange(WORLD), 0.0, f.is_late) for f in kinds for _ in range(times)]
    for number in _SIGNALS:
        late = number == signal.SIGSTOP
        strikes += [Strike(number.name, chance.randrange(WORLD), chance.uniform(0, 0.2), late, number) for _ in range(times)]
    chance.shuffle(strikes)
    beyond, named = {False: 0.0, True: 0.0}, 0
    pools = Pools()
    try:
        ranks = pools.get(WORLD)
        for done, strike in enumerate(strikes, 1):
            ranks.start()
            begin = time.monotonic()
            try:
                failure = _strike(ranks, strike)
            except Exception as error:
                yield f"{strike}: {type(error).__name__}: {error}"
                continue
            elapsed = time.monotonic() - begin
            beyond[strike.is_late] = max(
                beyond[strike.is_late], elapsed - (strike.limit_s if strike.is_late else strike.delay_s)
            )
            named += failure.rank == strike.culprit
            if failure.rank != strike.culprit:
                say(f"faults: {strike} was said to be of rank {failure.rank}: {failure}")
            try:
                results = ranks.run("suites.ranks.fault_jobs:healthy", [None] * WORLD, timeout_s=120)
                if results != [[float(WORLD)] * 3] * WORLD:
                    yield f"{strike}: the next job gave {results}"
            except RankFailure as error:
                yield f"{strike}: the next job failed: {error}"
            if done % 50 == 0:
                say(f"faults: {done} of {len(strikes)}")
    finally:
        pools.close()
    say(
        f"faults: {len(strikes)} of {len(strikes)}, {named} named the rank; told at most {beyond[False]:.2f} s after they "
        f"struck, those that use up the time limit {beyond[True]:.2f} s after it"
    )
    if max(beyond.values()) > 2.0:
        yield f"a failure was told {max(beyond.values()):.2f} s late, where 2 s is meant to be the most"


def _strike(ranks: RankPool, strike: Strike) -> RankFailure:
    if strike.number is None:
        return _failure(ranks, "suites.ranks.fault_jobs:" + strike.name, strike)
    pidfd = os.pidfd_open(ranks.pids[strike.culprit])
    # In a thread of its own, since the job holds this one.
    timer = threading.Timer(strike.delay_s, signal.pidfd_send_signal, [pidfd, strike.number])
    timer.start()
    try:
        return _failure(ranks, "suites.soak.soak_jobs:work_on", strike)
    finally:
        timer.join()
        os.close(pidfd)


def _failure(ranks: RankPool, job: str, strike: Strike) -> RankFailure:
    try:
        ranks.run(job, [strike.culprit] * WORLD, timeout_s=strike.limit_s, what=f"soak {strike.name}")
    except RankFailure as failure:
        return failure
    raise AssertionError("the job went through")


def graphs(count: int, seed: int, say: Say) -> Iterator[str]:
    """`count` graphs at 3 ranks, a tenth as many at 4 with groups within the world; the first that is not equal, cut short."""
    yield from _graphs("graphs", by_hand, count, seed, say)
    swept(2)
    say(f"graphs: {crossed(4, count // 10, seed)} of {count // 10} training steps cross iterations, and are equal; seed {seed}")


def scheduled(count: int, seed: int, say: Say) -> Iterator[str]:
    """As :func:`graphs`, with overlap that is found by itself, and buckets that stay hidden."""
    yield from _graphs("scheduled", automatic, count, seed, say)


def _graphs(name: str, plans: SearchStrategy[PlanChoice], count: int, seed: int, say: Say) -> Iterator[str]:
    pools = Pools()
    try:
        for world, part in ((3, count), (4, count // 10)):
            found = hunt(pools, world, part, seed, plans)
            say(f"{name}: {found.equal} of {part} equal at {world} ranks, {found.merged} of them merged; seed {seed}")
            if found.trouble is not None:
                text = "".join(traceback.format_exception(found.trouble))
                yield f"{name}: graph {found.equal + 1} of {part} at {world} ranks, seed {seed}:\n{text}"
    finally:
        pools.close()
