"""``fxbucket compare``: commits really take turns on ranks; what cannot be done is a sentence, status 2, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_fxbucket.bench import side as bench_side
from pytest_fxbucket.bench.side_by_side import RunLength
from pytest_fxbucket.cli import compare
from pytest_fxbucket.cli.__main__ import main
from pytest_fxbucket.errors import BenchmarkError
from pytest_fxbucket.plan.load import parse_plans
from suites.cli.small_repository import SmallRepository, command, environment
from suites.pytest_plugin.processes import ends
from suites.soak.speeds_project import MODEL, PLAN

Capsys = pytest.CaptureFixture[str]
MUCH = 1000
"""units of work that nobody can overlook: a step takes many times as long"""


Refused = Callable[[list[str], int, str], str]


@pytest.fixture(autouse=True)
def two_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of processes: more show no more of what is asked here."""
    monkeypatch.setattr(compare, "RunLength", partial(RunLength, sets=2, least_sets=2))


@pytest.fixture
def timed(repository: SmallRepository) -> SmallRepository:
    """A commit of a plan whose own back end has no step time."""
    repository.write("net.py", MODEL)
    repository.write("extra.txt", "0")
    repository.commit(plans__plan=PLAN.replace('"gloo"', '"local"'))
    return repository


def test_a_working_tree_that_does_much_more_is_slower_than_the_commit(
    timed: SmallRepository, untouched: None, capsys: Capsys
) -> None:
    timed.write("extra.txt", str(MUCH))
    timed.write("plans/conftest.py", "")  # the folder has other things than plans
    before, monkey = timed.state(), sys.path[:]
    assert main(["compare", "HEAD", "--plan", "plans", "--budget-s", "0.1", "--backend", "gloo", "--json"]) == 1
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["verdict"] == "slower"
    assert plan["log_ratio"] > plan["low"] > 0
    assert plan["threshold"] == 0.03
    sha = timed.git("rev-parse", "HEAD").strip()
    old, new = plan["sides"]
    assert (old["commit"], new["commit"]) == (sha, None)
    assert new["label"] == f"the working tree at {sha[:7]}, with uncommitted changes"
    assert old["digest"] == new["digest"], "the graph is the same, the operator is not"
    assert [len(one) for one in old["samples_s"]] == [len(one) for one in new["samples_s"]]
    assert len(old["samples_s"]) == 2
    assert len(new["peak_bytes"]) == 2
    assert timed.state() == before
    assert sys.path == monkey


def test_a_plan_that_was_come_across_and_is_not_in_a_commit_is_passed_over(
    timed: SmallRepository, untouched: None, capsys: Capsys
) -> None:
    """The ini names the folder."""
    timed.git("mv", "plans/plan.toml", "plans/other.toml")
    timed.write("pytest.ini", "[pytest]\nfxbucket_plans = plans\n")
    assert main(["compare", "HEAD"]) == 2
    said = capsys.readouterr()
    assert (
        said.err
        == f"fxbucket: plans/other.toml is passed over, since it is not in HEAD ({timed.git('rev-parse', 'HEAD')[:7]})\n"
    )


def test_a_row_that_was_come_across_and_is_not_in_a_commit_is_passed_over(
    timed: SmallRepository, untouched: None, refused: Refused
) -> None:
    off = PLAN.replace("benchmark = true", "benchmark = false")
    assert off != PLAN
    timed.write("plans/plan.toml", off + '[[matrix]]\nid = "new"\nchecks.benchmark = true\n')
    sha = timed.git("rev-parse", "HEAD")[:7]
    says = f"fxbucket: plans/plan.toml::new is passed over, since it is not in HEAD ({sha})\n"
    refused(["compare", "HEAD", "--plan", "plans"], 2, says)


def test_sides_with_other_work_to_do_are_not_compared(timed: SmallRepository, untouched: None, refused: Refused) -> None:
    """That a smaller model is faster tells nothing of its bucketing."""
    plan = PLAN.replace("dp_shard = 2", 'dp_shard = 2\nparam_dtype = "bfloat16"')
    assert plan != PLAN
    timed.write("plans/plan.toml", plan)
    says = "not comparable, the sides have other work to do: [parallel] param_dtype was not there and is bfloat16\n"
    refused(["compare", "HEAD", "--plan", "plans/plan.toml", "--backend", "gloo"], 2, says)


def test_each_side_has_its_own_interpreter(timed: SmallRepository, untouched: None, capsys: Capsys, tmp_path: Path) -> None:
    lacking = tmp_path / "python"
    lacking.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    lacking.chmod(0o755)
    words = [
        "compare",
        "HEAD",
        "HEAD",
        "--plan",
        "plans/plan.toml",
        "--python",
        os.path.relpath(lacking),
        "--python",
        sys.executable,
    ]
    assert main(words) == 2
    sha = timed.git("rev-parse", "HEAD")[:7]
    assert (
        f"at HEAD ({sha}): {lacking} cannot be used: ModuleNotFoundError: No module named 'torch'\n" in capsys.readouterr().err
    )


BESIDE_ITSELF = ["compare", "HEAD", "HEAD", "--plan", "plan.toml"]
STUB = "import json, os, signal, sys\nanswers = open(int(sys.argv[1]), 'w')\nrequest = json.loads(sys.stdin.readline())\n"
"""Begin of a side that a repository's own pytest_fxbucket has: quick, for what needs no ranks."""
FACTS = """
print(json.dumps({"protocol": 1, "facts": {"benchmark": None}, "files": []}), file=answers, flush=True)
sys.stdin.readline()
"""
"""It answers the first request, and has read that its first set is to run."""
TURNS = """
import socket, struct
facts = {"digest": ["a"], "ranks": 2, "backend": "gloo:plain", "torch": "2", "python": "3", "benchmark": None}
print(json.dumps({"protocol": 1, "facts": facts, "files": []}), file=answers, flush=True)
for request in map(json.loads, sys.stdin):
    with socket.socket(socket.AF_UNIX) as turns:
        turns.connect(f"\\0{request['address']}")
        while steps := turns.recv(1)[0]:
            turns.sendall(steps * struct.pack("=d", STEP_S))
    print(json.dumps({"protocol": 1, "has_priority": True, "peak_bytes": [1, 2]}), file=answers, flush=True)
"""
"""It takes all its turns, in steps that it says took STEP_S."""
NO_MORE = "print(json.dumps({'protocol': 1, 'error': f'no more in {os.getcwd()}/net.py'}), file=answers)"
"""A sentence that names a folder which is soon gone."""


def side(repository: SmallRepository, code: str) -> str:
    """Commit a package whose side of a comparison is `code`."""
    for name, text in {"__init__": "", "bench/__init__": "", "bench/side": code}.items():
        repository.write(f"pytest_fxbucket/{name}.py", text)
    return repository.commit(plan=PLAN)[:7]


def children() -> set[str]:
    """Processes that this one has started and that are still there."""
    return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mian", "--plan", "plan.toml"], 'REF mian is no commit of {top}; did you mean "main"?'),
        (["HEAD", "--plan", "plam.toml"], 'plam.toml is not in HEAD ({sha}); did you mean "plan.toml"?'),
        (["HEAD"], "no plan is named, and there is no ini fxbucket_plans; name one: --plan PATH[::ROW], or a folder"),
        (["HEAD", "--plan", "off"], "--plan: no plan there has [checks] benchmark = true; turn it on, or name a plan"),
        (["HEAD", "--plan", "plan.toml", "--threshold", "much"], "--threshold much: expected a fraction of the step below 1"),
        (["HEAD", "--plan", "plan.toml", "--threshold", "3"], "--threshold 3: expected a fraction of the step below 1"),
        (["HEAD", "--plan", "plan.toml", "--threshold", "nan"], "--threshold nan: expected a fraction of the step below 1"),
        (["HEAD", "--plan", "plan.toml", "--confidence", "99"], "--confidence 99: expected a number from 0.5 to 1"),
        (["HEAD", "--plan", "plan.toml", "--budget-s", "-1"], "--budget-s -1: expected seconds"),
        (["HEAD", "--plan", "plan.toml", "--pass", "manul"], '--pass: "manul" is no pass'),
        (["HEAD", "--plan", "plan.toml", *["--python", "x"] * 3], "--python is given 3 times, and there are two sides"),
        (["HEAD", "--plan", "plan.toml", "--python", "/no/python"], "/no/python cannot be started: No such file or directory"),
        (["HEAD", "--plan", "plan.toml::no"], 'plan.toml has no [[matrix]] row "no"; it has no rows'),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    repository: SmallRepository, untouched: None, refused: Refused, words: list[str], says: str
) -> None:
    sha = repository.commit(plan=PLAN, off__plan=PLAN.replace("benchmark = true", ""))
    err = refused(["compare", *words], 2, says.format(top=repository.top, sha=sha[:7]))
    assert [line for line in err.splitlines() if line.startswith("fxbucket: ")] == err.splitlines()[-1:]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print(json.dumps({'protocol': 9}), file=answers, flush=True)\nsignal.pause()", "it takes turns by protocol 9, not 1"),
        ("raise ValueError('a side that breaks')", "its process ended with status 1: ValueError: a side that breaks"),
        ("os.kill(os.getpid(), 9)", "its process ended by signal 9"),
        (f"{FACTS}\nos.kill(os.getpid(), 9)", "its process ended by signal 9"),
        (f"{FACTS}\n{NO_MORE}", ": no more in net.py"),
        (f"{FACTS}\nprint(json.dumps({{'protocol': 1}}), file=answers)", "it ended its turns by itself"),
        ("answers.write('{\"prot'); answers.flush(); os._exit(3)", "its process ended with status 3"),
    ],
)
def test_a_side_that_cannot_go_on_is_told_with_its_commit(
    repository: SmallRepository, untouched: None, refused: Refused, code: str, says: str
) -> None:
    sha, before = side(repository, STUB + code), children()
    err = refused(BESIDE_ITSELF, 2, f"{says}\n")
    assert f"fxbucket: plan.toml: at HEAD ({sha}): " in err
    assert err.endswith("\nboth sides are one commit: what is seen is noise\n")
    assert children() == before


@pytest.mark.parametrize(
    ("old_s", "new_s", "threshold", "status", "verdict"),
    [
        (0.1, 0.2, 0.03, 1, "new ({new}) is slower than old ({old}) (+100.0 %; 99 % interval +"),
        (0.2, 0.1, 0.03, 0, "new ({new}) is faster than old ({old}) (-50.0 %; 99 % interval -"),
        (0.1, 0.198, 0.99, 0, "no difference beyond the noise between new ({new}) and old ({old}) (+98.0 %; "),
    ],
)
def test_the_verdict_is_said_with_what_it_rests_on(
    repository: SmallRepository,
    untouched: None,
    capsys: Capsys,
    old_s: float,
    new_s: float,
    threshold: float,
    status: int,
    verdict: str,
) -> None:
    shas = {}
    for name, step_s in (("old", old_s), ("new", new_s)):
        shas[name] = side(repository, f"{STUB}STEP_S = {step_s}\n{TURNS}")
        repository.git("tag", name)
    assert main(["compare", "old", "new", "--plan", "plan.toml", "--budget-s", "0", "--threshold", str(threshold)]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"plan.toml: {verdict.format(**shas)}")
    assert lines[0].endswith(f"; threshold {100 * threshold:g} %)")
    assert lines[1] == f"  old ({shas['old']}): {1e3 * old_s:.2f} ms a step, 2 ranks over gloo, torch 2"
    assert lines[3:5] == ["  20 steps of each side in 2 sets of processes, in turns", "  both sides run the same graph"]


def test_a_step_that_differs_before_the_pass_is_told(repository: SmallRepository, untouched: None, capsys: Capsys) -> None:
    for name in ("old", "new"):
        side(repository, f"{STUB}STEP_S = 0.1\n" + TURNS.replace('["a"]', f'["{name}"], "traced": ["{name}"]'))
        repository.git("tag", name)
    assert main(["compare", "old", "new", "--plan", "plan.toml", "--budget-s", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[4].startswith("  the step before the pass differs, too: by code of the model")


def test_a_document_has_what_could_not_be_compared(repository: SmallRepository, untouched: None, capsys: Capsys) -> None:
    sha = side(repository, STUB + "raise ValueError('a side that breaks')")
    assert main([*BESIDE_ITSELF, "--json"]) == 2
    said = json.loads(capsys.readouterr().out)
    problem = f"plan.toml: at HEAD ({sha}): its process ended with status 1: ValueError: a side that breaks"
    assert said == {"format": 1, "plans": [], "problems": [problem]}


def test_a_commit_whose_own_package_times_no_steps_is_refused(
    repository: SmallRepository, untouched: None, refused: Refused
) -> None:
    repository.write("pytest_fxbucket/__init__.py", "")
    sha = repository.commit(plan=PLAN)[:7]
    refused(BESIDE_ITSELF, 2, f"at HEAD ({sha}): the pytest_fxbucket there cannot time steps beside another commit's")


def test_what_is_read_from_the_working_tree_is_refused(repository: SmallRepository, untouched: None, refused: Refused) -> None:
    late = repository.write("late.py", "")
    repository.git("add", "late.py")
    side(repository, f"{STUB}print(json.dumps({{'protocol': 1, 'facts': {{}}, 'files': [{str(late)!r}]}}), file=answers)")
    refused(BESIDE_ITSELF, 2, "late.py was imported from the working tree")


def test_a_back_end_that_nothing_is_timed_on_is_refused() -> None:
    (plan,) = parse_plans(PLAN, Path("plan.toml"))
    with pytest.raises(BenchmarkError, match=r"plan\.toml: back end local has no step time; use gloo, nccl or auto"):
        bench_side._backend(plan, "local")


def test_a_side_tells_what_was_imported_while_its_step_was_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = tmp_path / "late_side.py"
    late.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    traced = SimpleNamespace(facts=lambda: {"late": import_module("late_side").__name__})
    monkeypatch.setattr(bench_side, "_side", lambda asked, stack: traced)
    answer = next(iter(bench_side._answers(StringIO('{"protocol": 1}\n'))))
    assert str(late) in answer["files"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_leaves_no_side(repository: SmallRepository, tmp_path: Path, number: int, status: int) -> None:
    """Nor a worktree, but for SIGKILL, after which nobody can take it away, and the sides, ours, see that they are alone."""
    waiting = tmp_path / "waiting"
    os.mkfifo(waiting)
    tell = f"import os, signal\nos.write(os.open({str(waiting)!r}, os.O_WRONLY), b'%d\\n' % os.getpid())\nsignal.pause()\n"
    if number == signal.SIGKILL:
        repository.write("net.py", tell)
        repository.commit(plan=PLAN)
    else:
        side(repository, tell)
    process = subprocess.Popen(command(*BESIDE_ITSELF), cwd=repository.top, env=environment(), start_new_session=True)
    with open(waiting) as file:
        sides = [int(file.readline()), int(file.readline())]
        assert repository.git("worktree", "list").count("\n") == 3
        os.kill(process.pid, number)
        assert process.wait(timeout=60) == status
        assert all(ends(pid) for pid in sides)
    if number != signal.SIGKILL:
        assert repository.git("worktree", "list").count("\n") == 1
