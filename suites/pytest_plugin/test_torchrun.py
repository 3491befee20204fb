"""Two of torchrun's agents with two processes each: one report, one outcome for each item, an end whatever happens."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from suites.pytest_plugin import agents
from suites.pytest_plugin.torchrun_project import FILES
from suites.warm.runs import WarmRuns


def project(folder: Path) -> Path:
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


GREEN = ("audit", "golden", "collectives", "test_sum", "test_two_of_four", "test_only_rank_0_writes", "test_last")
RED = {
    "test_body": r"rank 3 of 4 raised AssertionError: assert 3 != 3",
    "test_one_never_comes": r"on rank 3 \(node \d\):.*ValueError: before anything",
    "test_rank_0_never_comes": r"the ranks could not begin: rank 0 \(node \d\) went on without it",
    "test_killed_child": r"rank 2 of 4 was killed by SIGKILL",
    "test_no_plain_data": r"rank 1 of 4 could not answer: its result has a pathlib.*, and only plain data goes to other",
    "test_raising_child": r"rank 2 of 4 raised ValueError: at once",
    "test_hanging_child": r"did not answer within 2 s.*rank 1 never launched collective 1",
    "test_eight_of_four": r"8 ranks are needed and torchrun started 4",
    "test_other_jobs": r"do not run the same: rank 1 \(node \d\) runs jobs:hangs .*, rank 0 runs jobs:total",
    "test_skipped_by_one": r"the processes disagree: rank 0 .*passed, rank 1 .*skipped \(here only\), rank 2",
    "test_set_up": r"on rank 2 \(node \d\):.*no such device",
}


def test_agents_hear_of_a_failure_and_end_nobody_before_the_report(tmp_path: Path, warm_runs: WarmRuns) -> None:
    done = agents.run(warm_runs, project(tmp_path), "test_items.py", "-v", "-k", "sum or body or last", ORDER="own")
    assert done.statuses == [1, 1]
    assert done.left == []
    reported_once_in_rank_0s_order(done.output, ["test_sum", "test_body", "test_last"])
    assert re.search(RED["test_body"], done.output)
    assert re.search(r"^=+ 1 failed, 2 passed, \d+ deselected", done.output, re.M)


def test_a_failure_of_one_rank_fails_its_item_and_says_whose_and_all_others_are_well(
    tmp_path: Path, warm_runs: WarmRuns
) -> None:
    """Everything that may go wrong without ending the session, in one run."""
    folder = project(tmp_path)
    args = (
        "plans/good.toml",
        "plans/loud.toml",
        "test_items.py",
        "--accept",
        "--junitxml=report.xml",
        "--log-file=log.txt",
        "-v",
    )
    done = agents.run_alone(warm_runs, folder, *args, each=2, ORDER="own")
    assert done.statuses == [1] * 4
    assert done.left == []
    told = {}
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
        told[str(case.get("name"))] = "\n".join(f"{child.get('message')}\n{child.text}" for child in problems)
    assert {name: told[name] for name in GREEN if told[name]} == {}
    for name, sentence in RED.items():
        assert re.search(sentence, told[name], re.DOTALL), told[name]
    reported_once_in_rank_0s_order(done.output, re.findall(r"^def (test_\w+)", FILES["test_items.py"], re.M))
    assert [path.name for path in folder.glob("golden/plans/*")] == ["good.txt"]
    assert done.output.count("golden written:") == 1
    left_the_logs_of_all_ranks_by_node(folder)
    assert re.findall(r"of rank \d", (folder / "log.txt").read_text()) == ["of rank 0"]
    assert "rank 3 of 4 raised ValueError: no data on rank 3" in done.output


def reported_once_in_rank_0s_order(output: str, names: list[str]) -> None:
    assert output.count("test session starts") == 1
    ran_items = re.findall(r"^(\S+::\S+) (?:PASSED|FAILED|ERROR)", output, re.M)
    assert [item.partition("::")[2] for item in ran_items if item.startswith("test_")] == names
    assert "torchrun, 4 ranks on 2 nodes" in output
    assert "INTERNALERROR" not in output


def left_the_logs_of_all_ranks_by_node(root: Path) -> None:
    (folder,) = root.glob(".fxbucket/plans-loud.toml-*/bitwise")
    logs = {path.name: path.read_text() for path in folder.glob("*.log")}
    nodes = {name.partition(".")[2]: name.partition(".")[0] for name in logs}
    assert sorted(nodes) == [f"rank{rank}.log" for rank in range(4)]
    assert set(nodes.values()) == {"node0", "node1"}
    assert all(f"batch of rank {name[-5]}" in text for name, text in logs.items())
    assert not list(root.glob(".fxbucket/plans-good.toml-*/*"))


def test_a_lost_process_ends_the_run_with_its_name(tmp_path: Path, warm_runs: WarmRuns) -> None:
    done = agents.run_alone(warm_runs, project(tmp_path), "test_killed.py", "-v")
    assert 0 not in done.statuses
    assert done.left == []
    assert re.search(r"Interrupted: rank 1 \(node \d\) is gone: its process has ended", done.output)
    assert re.search(r"^E .*rank 1 (of 2|\(node \d\)) is gone: its process has ended", done.output, re.M)
    assert "test_first PASSED" in done.output
    assert "test_gone FAILED" in done.output
    assert "test_never_begun" not in done.output


def test_an_expectation_that_cannot_be_written_is_rank_0s_exit_status(tmp_path: Path, warm_runs: WarmRuns) -> None:
    done = agents.run_alone(warm_runs, project(tmp_path), "test_two_texts.py", "--accept")
    assert done.statuses == [1, 0]
    assert "NOT rewritten: test_two_texts.py:" in done.output
    assert re.search(r"^=+ 2 passed", done.output, re.M)


def test_other_items_on_one_node_end_the_run_before_it_begins(tmp_path: Path, warm_runs: WarmRuns) -> None:
    done = agents.run_alone(warm_runs, project(tmp_path), "test_killed.py", ORDER="lacking", LACKING_NODE="1")
    assert 0 not in done.statuses
    different = r"different items: rank \d \(node \d\) (lacks|has) test_killed.py::test_gone, which rank 0 (has|lacks)"
    assert re.search(different, done.output)
    assert done.left == []


def test_workers_of_xdist_are_refused(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xdist", reason="-n needs pytest-xdist")
    numbers = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    for name, value in {**numbers, "GROUP_WORLD_SIZE": "1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "suite"}.items():
        monkeypatch.setenv(name, value)
    result = pytester.runpytest_inprocess("-n2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: -n under torchrun: *leave out -n, or torchrun"])


def test_a_part_that_torchrun_did_not_say_is_named(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "suite")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: WORLD_SIZE is '' although torchrun started this process; *"])
