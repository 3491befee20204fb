"""The part of the soak that feeds us garbage: mutated plans, goldens, stored runs and command lines; none is taken for well.

Garbage may be refused in a sentence, or, if it is none, give what the unmutated gives. All else is a fault.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import signal
import tempfile
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pytest_fxbucket.bench.compare import verdict_of
from pytest_fxbucket.cli.__main__ import main
from pytest_fxbucket.errors import BenchmarkError, FxbucketError
from pytest_fxbucket.golden.store import GoldenStore
from pytest_fxbucket.plan import load_plans
from pytest_fxbucket.plan.load import BrokenRow, load_rows
from suites.bench.records import fields, record
from suites.bench.storage import KIND, PLAN, file_text
from suites.soak.mutants import broken_plan, broken_run, mutated_bytes, mutated_words

ROOT = Path(__file__).resolve().parents[2]
PLANS = sorted((ROOT / "fixtures" / "plans").glob("*.toml"))
GOLDENS = sorted((ROOT / "golden").rglob("*.txt"))


class Fault(Exception):
    """Garbage was taken for something, or refused otherwise than in one sentence."""


def a_plan(chance: random.Random, folder: Path) -> str:
    """A plan file with something in it that is wrong for certain, or with bytes changed."""
    source = chance.choice(PLANS)
    path = folder / source.name
    is_broken = chance.random() < 0.5
    data = source.read_bytes()
    data = broken_plan(data.decode(), chance).encode() if is_broken else mutated_bytes(data, chance)
    path.write_bytes(data)
    try:
        found = load_rows(path)
    except FxbucketError as error:
        _one_sentence(error)
        if _tables(data) == _tables(source.read_bytes()):
            raise Fault(f"a plan that says what {source.name} says is refused: {error}") from error
        return "refused"
    for row in found:
        if isinstance(row, BrokenRow):
            _one_sentence(row.error)
    if is_broken and not any(isinstance(row, BrokenRow) for row in found):
        raise Fault("a plan that is wrong is loaded")
    tables = _tables(data)
    if tables is None:
        raise Fault("what is no TOML is loaded")
    if tables == _tables(source.read_bytes()):
        same = [(plan.matrix_id, plan.parallel, plan.bucket) for plan in load_plans(source)]
        if same != [(row.matrix_id, row.parallel, row.bucket) for row in found if not isinstance(row, BrokenRow)]:
            raise Fault("a plan that says the same is another one")
        return "equal"
    return "refused" if is_broken else "another"


def a_golden(chance: random.Random, folder: Path) -> str:
    """A golden with bytes changed: nothing but what was accepted may ever be compared with."""
    source = chance.choice(GOLDENS)
    path = folder / "golden" / "it.txt"
    path.parent.mkdir(exist_ok=True)
    store = GoldenStore(path.parent, folder)
    path.write_bytes(source.read_bytes())
    accepted = store.read(path)
    path.write_bytes(mutated_bytes(source.read_bytes(), chance))
    try:
        found = store.read(path)
    except FxbucketError as error:
        _one_sentence(error)
        return "refused"
    if found != accepted:
        raise Fault("a golden that was changed is taken for one that was accepted")
    return "equal"


def a_run(chance: random.Random, folder: Path) -> str:
    """A stored run with a field that it cannot have, or with bytes changed."""
    path = folder / ".benchmarks" / KIND / "0001_run.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    (folder / "plans").mkdir(exist_ok=True)
    (folder / PLAN).write_text("a = 1\n")
    is_broken = chance.random() < 0.5
    values = fields(seed=1)
    data = file_text(broken_run(values, chance) if is_broken else values).encode()
    path.write_bytes(data if is_broken else mutated_bytes(data, chance))
    now = record(commit=None, time="2026-12-24T10:00:00+00:00", seed=2)
    try:
        verdict = verdict_of(str(path), now, 0.03, folder / ".benchmarks", folder)
    except BenchmarkError as error:
        _one_sentence(error)
        return "refused"
    if is_broken and verdict.outcome == "passed":
        raise Fault(f"a run that is none is compared with: {verdict.summary}")
    with contextlib.suppress(ValueError):
        if json.loads(path.read_bytes()) == json.loads(data):
            return "equal"
    return "refused" if is_broken else "another"


COMMANDS: Sequence[Sequence[str]] = (
    ("show", "broken.toml"),
    ("show", "broken.toml::row", "--rank", "0", "--full"),
    ("explain", "broken.toml", "--why", "w", "--json"),
    ("diff", "broken.toml", "--pass", "manual", "--pass", "torch"),
    ("diff", "broken.toml", "none.toml"),
    ("diff", "broken.toml", "--at", "HEAD"),
    ("init", "none:build", "--arg", "layers=4", "--out", "first.toml"),
    ("compare", "HEAD", "--plan", "broken.toml"),
    ("pytest", "--fxbucket-plans=broken.toml", "--fxbucket-pass=manual"),
    ("pytest", "broken.toml::plan", "--fxbucket-accept=new", "--fxbucket-backend=gloo"),
    ("pytest", "--fxbucket-plans=broken.toml", "--fxbucket-compare=latest", "--fxbucket-report=pages"),
)
_KNOWN = ("--rank", "--pass", "torch", "--full", "--at", "--why", "--json", "--out", "--plan", "--arg", "x=1", "--accept")
_KNOWN += ("--fxbucket-plans", "--fxbucket-accept", "--fxbucket-prune", "--fxbucket-golden", "show", "diff", "explain")


def a_command(chance: random.Random, folder: Path) -> str:
    """A command line about a plan that is broken, so that it can do nothing, however it is changed."""
    (folder / "broken.toml").write_text("[modle]\n")
    (folder / "pytest.ini").write_text("[pytest]\n")
    command, *words = chance.choice(COMMANDS)
    words = mutated_words(words, chance, _KNOWN)
    if any(word.startswith(("-h", "--h", "-V", "--ver")) for word in words):
        return "asks for help"
    said = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = _pytest(words) if command == "pytest" else main([command, *words])
    if "Traceback (most recent" in said.getvalue() or "INTERNALERROR" in said.getvalue():
        raise Fault(f"{command} {words!r} printed a traceback:\n{said.getvalue()[-3000:]}")
    if status == 0:
        raise Fault(f"{command} {words!r} ended well:\n{said.getvalue()[-2000:]}")
    return "refused"


def _pytest(words: Sequence[str]) -> int:
    """Nothing in the folder can pass: the plan is one failing item."""
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    return int(pytest.main([*quiet, "--rootdir=.", "-c", "pytest.ini", *words]))


def _tables(data: bytes) -> object:
    """What TOML has it say; None if it is none."""
    try:
        return tomllib.loads(data.decode("utf-8-sig").replace("\r\n", "\n"))
    except (ValueError, RecursionError):
        return None


def _one_sentence(error: Exception) -> None:
    text = str(error)
    if not text or "\n" in text or "Traceback" in text:
        raise Fault(f"no one sentence: {text!r}")


Judge = Callable[[random.Random, Path], str]
KINDS: dict[str, Judge] = {"plans": a_plan, "goldens": a_golden, "stored runs": a_run, "command lines": a_command}
LIMIT_S = 60
_MOST_TOLD = 5


class _Hangs(BaseException):
    """No exception that anybody catches."""


def garbage(count: int, seed: int, say: Callable[[str], None], kinds: dict[str, Judge] = KINDS) -> Iterator[str]:
    """`count` mutants in equal parts of each kind, each of its number and `seed` alone; a sentence for each fault."""
    for kind, judge in kinds.items():
        part, outcomes, faults = count // len(kinds), Counter[str](), list[str]()
        for number in range(part):
            try:
                outcomes[_judged(judge, random.Random(f"{seed} {kind} {number}"))] += 1
            except (Exception, _Hangs, SystemExit) as error:
                faults.append(f"garbage: {kind} number {number}, seed {seed}: {_told(error)}")
        what = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common())
        say(f"garbage: {part - len(faults)} of {part} {kind} as they should be ({what}); seed {seed}")
        yield from faults[:_MOST_TOLD]
        if len(faults) > _MOST_TOLD:
            yield f"garbage: and {len(faults) - _MOST_TOLD} more {kind}, seed {seed}"
        if part >= 20 and outcomes["refused"] < part // 4:
            yield f"garbage: {outcomes['refused']} of {part} {kind} were refused, so that they show little"


def _judged(judge: Judge, chance: random.Random) -> str:
    with tempfile.TemporaryDirectory() as folder:
        before = signal.signal(signal.SIGALRM, _hangs)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        try:
            return judge(chance, Path(folder))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _hangs(*_: object) -> None:
    raise _Hangs(f"not done in {LIMIT_S} s")


def _told(error: BaseException) -> str:
    if isinstance(error, Fault):
        return str(error)
    return "".join(traceback.format_exception(error))[-3000:]
