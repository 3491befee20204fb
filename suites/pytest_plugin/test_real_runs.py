"""Plans run for real, from the command line to goldens on disk: on one process, on workers, and from users' tests."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import OrderedDict
from pathlib import Path

import pytest

DIES_ONCE = """
import os, tiny
from tiny import batch, loss

def build():
    if not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), 9)
    return tiny.build()
"""


def outcomes(junit: str) -> dict[str, str]:
    """Return plan and item name -> passed, failure, skipped or error."""
    cases = ElementTree.parse(junit).iter("testcase")
    names = {f"{case.get('classname')} {case.get('name')}": [child.tag for child in case] for case in cases}
    return {name: next((tag for tag in tags if tag != "properties"), "passed") for name, tags in names.items()}


def golden_names(project: pytest.Pytester) -> list[str]:
    return sorted(path.name for path in project.path.glob("golden/**/*") if path.is_file())


@pytest.mark.usefixtures("warm")
class TestPlans:
    def test_what_one_process_accepted_is_green_on_workers_where_each_plan_has_one(self, project: pytest.Pytester) -> None:
        pytest.importorskip("xdist", reason="-n needs pytest-xdist")
        with Path("plans/good.toml").open("a") as plan:  # plain.toml has those that take long
            plan.write("[checks]\nsame = false\nbitwise = false\neager = false\n")
        args = ("--fxbucket-plans=plans", "-v", "--durations=3")
        first = project.runpytest_subprocess(*args, "plans/good.toml", "--fxbucket-accept=new")
        first.assert_outcomes(passed=6)
        assert golden_names(project) == ["good.keep.txt", "good.txt"]
        first.stdout.fnmatch_lines(
            [
                "fxbucket: * pass as planned, * accepting goldens: new, torch *",
                "plans/good.toml: * → * launches, * buckets, * audit passed, golden passed, collectives passed",
                "golden written: golden/plans/good.txt",
            ]
        )

        second = project.runpytest_subprocess(*args, "--junitxml=second.xml", "-n2")
        second.assert_outcomes(passed=11, failed=2)
        failed = {name for name, outcome in outcomes("second.xml").items() if outcome != "passed"}
        assert failed == {"plans.broken.toml plan", "plans.plain.toml golden"}
        second.stdout.fnmatch_lines(["*golden/plans/plain.txt is missing; *pytest plans/plain.toml::golden*=new"])
        second.stdout.fnmatch_lines(["plans/plain.toml: * audit passed, golden failed, *, bitwise passed, eager passed"])
        assert golden_names(project) == ["good.keep.txt", "good.txt"]
        self.each_plan_has_one_worker(second.outlines)

    def each_plan_has_one_worker(self, lines: list[str]) -> None:
        ran = [line.split() for line in lines if line.startswith("[gw") and "::" in line]
        pairs = {(words[0], words[-1].partition("::")[0]) for words in ran}
        assert len(pairs) == len({plan for _, plan in pairs}) == 3

    def test_a_plan_is_let_go_after_its_last_item(self, project: pytest.Pytester) -> None:
        project.makeconftest(
            """
            import gc, weakref, pytest
            from pytest_fxbucket.pytest_plugin.session import fx_session

            runs = []

            @pytest.hookimpl(wrapper=True)
            def pytest_runtest_call(item):
                yield
                runs.append(weakref.ref(fx_session(item.config).run_of(item.plan)))

            def pytest_runtest_logfinish(nodeid):
                gc.collect()
                print(nodeid, "alive:", sum(run() is not None for run in runs))
            """
        )
        result = project.runpytest_subprocess("-s", "plans/good.toml", "-k", "audit or collectives")
        result.stdout.fnmatch_lines(
            ["*::audit alive: 1", "*::collectives alive: 0", "*::audit[[]keep] alive: 1", "*::collectives[[]keep] alive: 0"]
        )


class TestWorkers:
    @pytest.mark.usefixtures("warm")
    def test_a_worker_that_dies_fails_its_item_once_and_the_rest_still_runs(self, project: pytest.Pytester) -> None:
        pytest.importorskip("xdist", reason="-n needs pytest-xdist")
        Path("dies.py").write_text(DIES_ONCE)
        Path("plans/dies.toml").write_text(
            Path("plans/plain.toml").read_text().replace("tiny:", "dies:")
            + "[checks]\ngolden = false\nsame = false\nbitwise = false\neager = false\n"
        )
        result = project.runpytest_subprocess("plans/dies.toml", "plans/plain.toml", "-k", "audit or dies", "-n2")
        result.assert_outcomes(failed=1, passed=2)
        result.stdout.fnmatch_lines(["plans/dies.toml: *audit error, collectives passed", "plans/plain.toml: *audit passed"])

    def test_a_worker_that_takes_anothers_place_gets_two_items(self) -> None:
        """A worker holds its last item back until it gets another one, or is told that there is none."""
        pytest.importorskip("xdist", reason="-n needs pytest-xdist")
        from pytest_fxbucket.pytest_plugin.xdist import PlanScheduling

        class Worker:
            shutting_down, sent = False, list[list[int]]()

            def send_runtest_some(self, numbers: list[int]) -> None:
                self.sent.append(numbers)

        worker, scheduling = Worker(), object.__new__(PlanScheduling)
        scheduling.workqueue = OrderedDict((name, {name: False}) for name in "abc")
        scheduling.assigned_work, scheduling.registered_collections = {worker: {}}, {worker: list("abc")}
        scheduling.log = lambda *words: None
        scheduling._reschedule(worker)
        assert worker.sent == [[0], [1]]


@pytest.mark.usefixtures("warm")
class TestFixtures:
    def test_a_test_of_ten_lines_does_all_four_checks(self, project: pytest.Pytester) -> None:
        project.makepyfile(
            test_a="""
            import pytest

            pytestmark = pytest.mark.fxbucket_plan("plans/plain.toml")

            @pytest.mark.parametrize("name", ["audit", "golden", "collectives", "bitwise"])
            def test_check(fxbucket_check, name):
                assert fxbucket_check(name)

            def test_graphs(fxbucket_graph, fxbucket_bucketed, fxbucket_run):
                assert fxbucket_graph is fxbucket_run.step
                assert fxbucket_bucketed is fxbucket_run.bucketed

            def test_ranks(fxbucket_ranks):
                assert fxbucket_ranks(2) is fxbucket_ranks(2)
                assert fxbucket_ranks(2).run("jobs:double", [3, 4], timeout_s=60, paths=["."]) == [6, 8]
            """
        )
        Path("jobs.py").write_text("def double(rank, world, payload): return 2 * payload\n")
        project.runpytest_subprocess("test_a.py", "--fxbucket-accept=new").assert_outcomes(passed=6)
        assert golden_names(project) == ["plain.txt"]

    def test_a_failed_check_shows_the_verdict_where_it_was_asserted(self, project: pytest.Pytester) -> None:
        project.makepyfile(
            test_a=r"""
            import pytest
            from pytest_fxbucket.errors import FxbucketError

            @pytest.mark.fxbucket_plan("plans/plain.toml")
            def test_golden(fxbucket_check):
                with pytest.raises(FxbucketError, match="plain.txt is missing") as caught:
                    assert fxbucket_check("golden")
                assert len(caught.traceback.filter(caught)) == 1
                raise caught.value

            @pytest.mark.fxbucket_plan("plans/plain.toml")
            @pytest.mark.parametrize("name", ["overlap", "memory", "mutation"])
            def test_limits(fxbucket_check, name):
                with pytest.raises(FxbucketError, match=rf"plain.toml: {name} has nothing to .* plan \[checks\] {name}"):
                    fxbucket_check(name)

            @pytest.mark.fxbucket_plan("plans/nothing.toml")
            def test_audit(fxbucket_bucketed):
                pass
            """
        )
        Path("plans/nothing.toml").write_text(Path("plans/plain.toml").read_text().replace("head", "heed"))
        result = project.runpytest_subprocess("test_a.py")
        result.assert_outcomes(failed=1, errors=1, passed=3)
        result.stdout.fnmatch_lines(
            ["*heed*head*", ">*raise caught.value", "E *GoldenError: golden/plans/plain.txt is missing*"]
        )

    @pytest.mark.parametrize("given", ["fxbucket_graph.graphs['joint']", "fxbucket_bucketed.graph_module"])
    def test_one_that_changes_what_it_was_given_fails_and_so_do_the_checks_behind_it(
        self, project: pytest.Pytester, given: str
    ) -> None:
        """All checks compare with these graphs, and would call a pass right that does the same."""
        project.makepyfile(
            test_a=f"""
            import copy
            import torch
            import pytest

            pytestmark = pytest.mark.fxbucket_plan("plans/plain.toml")

            def break_it(graph_module):
                product = next(node for node in graph_module.graph.nodes if node.target is torch.ops.aten.mm.default)
                product.args = (product.args[0], product.args[0])

            def test_a_copy(fxbucket_graph, fxbucket_bucketed):
                break_it(copy.deepcopy({given}))

            def test_itself(fxbucket_graph, fxbucket_bucketed):
                break_it({given})

            def test_audit(fxbucket_check):
                assert fxbucket_check("audit")

            def test_of_its_own(fxbucket_graph):
                pass
            """
        )
        result = project.runpytest_subprocess("test_a.py")
        result.assert_outcomes(passed=1, failed=3)
        result.stdout.fnmatch_lines(
            ["*test_itself*", "plans/plain.toml: graph joint of the*has been changed, first at mm*copy.deepcopy*"]
        )

    def test_what_the_pass_made_of_several_graphs_is_all_of_them(self, project: pytest.Pytester) -> None:
        """Rank 0's of a step in stages; one of them that is given by itself has its roles, too."""
        project.makepyfile(
            test_a="""
            import pytest

            pytestmark = pytest.mark.fxbucket_plan("plans/staged.toml")

            def test_all(fxbucket_bucketed, fxbucket_golden):
                assert fxbucket_bucketed == fxbucket_golden("all")

            def test_first(fxbucket_bucketed, fxbucket_golden):
                assert fxbucket_bucketed.graph_module == fxbucket_golden("first")
            """
        )
        staged = Path("plans/plain.toml").read_text().replace("dp_shard = 2", "dp_shard = 2\npp = 2").replace("[0-1]", "*")
        Path("plans/staged.toml").write_text(staged + '[pipeline]\ncuts = ["blocks.1"]\n[step]\nmicrobatches = 3\n')
        project.runpytest_subprocess("test_a.py", "--accept").assert_outcomes(passed=2)
        whole, first = (Path(f"golden/test_a/{name}.txt").read_text() for name in ("all", "first"))
        graphs = [line for line in whole.splitlines() if line.startswith("graph ")]
        assert graphs[0] == "graph stage 0 unshard"
        assert "graph stage 0 reduce" in graphs
        assert "plan plans/staged.toml\n" in first
        assert [line for line in first.splitlines() if line.startswith("graph ")] == graphs[:1]
