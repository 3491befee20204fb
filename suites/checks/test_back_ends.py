"""What bitwise runs on: named skips where GPUs lack, failures where they are required, and graphs that no GPU can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.backends import BackendChoice, Machine
from pytest_fxbucket.checks.attention_on_gpus import OPERATORS
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.compat import fake_tensors
from pytest_fxbucket.errors import CaptureError, RankError
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema_checks import Benchmark, Run
from pytest_fxbucket.plan.schema_model import Parallel
from pytest_fxbucket.ranks import machine as machines
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings

ROOT = Path(__file__).parents[2]
TOO_FEW = "nccl needs 2 GPUs, this machine has 0"
NO_GPUS = Machine(has_cuda=True, nccl=(2, 29, 7))
GPUS = Machine(("GPU-a", "GPU-b"), has_cuda=True, nccl=(2, 30, 7))


Check = Callable[..., Verdict]


@pytest.fixture
def check(bitwise: Check, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Run the check of a plan that names a back end, on a machine with these GPUs; keywords are RunSettings."""

    def run(named: str, machine: Machine, **settings: object) -> Verdict:
        monkeypatch.setattr(machines, "this_machine", lambda: machine)
        return bitwise(settings=settings, run=Run(steps=1, timeout_s=60, backend=named))

    return run


def test_a_mesh_of_any_size_is_a_named_skip_where_nothing_would_be_run(bitwise: Check) -> None:
    verdict = bitwise(run=Run(steps=1, backend="fake"), parallel=Parallel(dp_shard=131072))
    assert (verdict.outcome, verdict.summary) == ("skipped", "back end fake holds no values to compare")


class TestTooFewGpus:
    @pytest.mark.parametrize("named", ["nccl", "gloo:cuda"])
    def test_a_back_end_that_is_named_is_a_named_skip(self, check: Check, named: str) -> None:
        verdict = check(named, NO_GPUS)
        assert verdict.outcome == "skipped"
        assert verdict.summary == {"nccl": TOO_FEW, "gloo:cuda": "gloo:cuda needs 1 GPU, this machine has 0"}[named]

    def test_the_option_goes_before_the_plan(self, check: Check) -> None:
        assert check("gloo", NO_GPUS, backend="nccl").summary == TOO_FEW

    def test_auto_runs_on_gloo_and_the_summary_says_so(self, check: Check) -> None:
        verdict = check("auto", NO_GPUS)
        assert verdict, repr(verdict)
        assert "on 2 ranks in 1 steps over gloo; " in verdict.summary

    def test_auto_says_why_not_nccl_where_there_are_gpus(self, check: Check) -> None:
        verdict = check("auto", Machine(GPUS.gpus[:1], has_cuda=True, nccl=(2, 29, 7)))
        assert verdict, repr(verdict)
        assert "over gloo (nccl needs 2 GPUs, this machine has 1; NCCL 2.29.7 gives each rank its own, " in verdict.summary

    @pytest.mark.parametrize("named", ["nccl", "auto"])
    def test_where_gpus_are_required_it_is_an_error(self, check: Check, named: str) -> None:
        with pytest.raises(RankError, match=f"{TOO_FEW}; --fxbucket-require-gpus makes that an error"):
            check(named, NO_GPUS, require_gpus=True)

    def test_a_plan_for_gloo_needs_none_even_then(self, check: Check) -> None:
        verdict = check("gloo", NO_GPUS, require_gpus=True)
        assert verdict, repr(verdict)

    def test_the_pytest_process_is_asked_for_real(self, bitwise: Check) -> None:
        verdict = bitwise(settings={"backend": "nccl"}, parallel=Parallel(dp_shard=64))  # more than any machine has
        assert verdict.outcome == "skipped"
        assert verdict.summary.startswith(("nccl needs 64 GPUs, this machine has ", "nccl needs a torch that was built with "))


def test_step_time_on_a_shared_gpu_is_skipped_by_name_or_an_error_where_gpus_are_required(
    pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "this_machine", lambda: replace(GPUS, gpus=GPUS.gpus[:1]))
    monkeypatch.setattr("pytest_fxbucket.checks.context.cannot_run_on", lambda *_, **__: "")  # as on a build for CUDA
    (plan,) = load_plans(Path(__file__).parents[1] / "soak/small.toml")
    timed = replace(plan, run=replace(plan.run, backend="nccl"), checks=replace(plan.checks, benchmark=Benchmark()))
    settings = RunSettings(tmp_path, tmp_path, tmp_path)
    verdict = PlanRun(timed, settings, pools).check("benchmark")
    said = "nccl puts 4 ranks on a GPU, where kernels take turns, which says nothing of step time"
    assert verdict.outcome == "skipped"
    assert verdict.summary.startswith(said)
    with pytest.raises(RankError, match=f"{said}; use .*; --fxbucket-require-gpus makes that an error"):
        PlanRun(timed, replace(settings, require_gpus=True), pools).check("benchmark")


# A CPU build of torch lacks many of CUDA's kernels, which makes every graph one that no GPU can run.
@pytest.fixture
def cpu_build() -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch was built with CUDA, on which the graph does run")


@pytest.mark.usefixtures("cpu_build")
class TestGraphsForTheCpu:
    def test_auto_stays_on_gloo_and_names_the_operator(self, check: Check) -> None:
        verdict = check("auto", GPUS)
        assert verdict, repr(verdict)
        assert "over gloo (the graph, which is traced on the CPU, calls aten." in verdict.summary

    @pytest.mark.parametrize(("named", "required"), [("nccl", False), ("gloo:cuda", False), ("auto", True)])
    def test_else_it_is_an_error_with_what_to_do(self, check: Check, named: str, required: bool) -> None:
        with pytest.raises(CaptureError, match=r"calls aten\..* which cuda does not have; let the model call what all devices"):
            check(named, GPUS, require_gpus=required)


class TestAttention:
    """Of its operator a GPU has our kernel alone, by which two graphs can be compared, and no trainer's step."""

    @pytest.fixture
    def choice(self, pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BackendChoice | Verdict]:
        monkeypatch.setattr(machines, "this_machine", lambda: replace(GPUS, gpus=(*GPUS.gpus, "GPU-c", "GPU-d")))
        monkeypatch.setattr(fake_tensors, "has_kernel", lambda op, device: op not in OPERATORS)  # as on a build for CUDA
        plan = load_plans(ROOT / "fixtures/plans/cp.toml")[0]

        def choose(check: str, named: str, **settings: Any) -> BackendChoice | Verdict:
            given = RunSettings(ROOT, tmp_path, tmp_path, backend=named, **settings)
            return PlanRun(plan, given, pools)._context(check).choice(check)

        return choose

    def test_auto_keeps_eager_alone_on_gloo(self, choice: Callable[..., BackendChoice | Verdict]) -> None:
        assert choice("bitwise", "auto") == BackendChoice("nccl", ranks_on_gpu=1)
        kept = choice("eager", "auto")
        assert isinstance(kept, BackendChoice)
        assert kept.backend == "gloo"
        assert "_scaled_dot_product_flash_attention_for_cpu" in kept.lacking

    @pytest.mark.parametrize(("named", "settings"), [("nccl", {}), ("auto", {"require_gpus": True})])
    def test_where_gpus_are_asked_for_eager_goes_there_to_be_skipped(
        self, choice: Callable[..., BackendChoice | Verdict], named: str, settings: dict[str, Any]
    ) -> None:
        assert choice("eager", named, **settings) == BackendChoice("nccl", ranks_on_gpu=1)
