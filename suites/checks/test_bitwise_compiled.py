"""``[run] compiler``: both steps are compiled alike before bitwise runs them, and what inductor launches when is read."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_fxbucket.checks.bitwise.check import lacks_compiler
from pytest_fxbucket.checks.bitwise.compiled import CompiledGraph, launched_later, launches_in, other_launches
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema_checks import Run
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.checks.bitwise_models import tanh_off_by_a_little
from suites.checks.conftest import PLAN
from suites.compiled.rank_jobs_of_compiled import WITHOUT_CODE
from suites.plan.plan_texts import BUCKET, MODEL, PARALLEL, refusal

Bitwise = Callable[..., Verdict]
WORDS = {"L": "all_gather_into_tensor", "R": "reduce_scatter_tensor", "w": "wait_tensor"}
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor writes code for CPUs where there is g++, which is not here"
)


def compiled_by(name: str) -> Run:
    return replace(PLAN.run, steps=1, timeout_s=300, compiler=name)


def test_both_are_compiled_and_a_broken_pass_is_found_behind_the_compiler(bitwise: Bitwise) -> None:
    verdict = bitwise(run=compiled_by("aot_eager"))
    assert verdict, repr(verdict)
    assert "equal bit for bit, both compiled by aot_eager, on 2 ranks" in verdict.summary
    broken = bitwise(run=compiled_by("aot_eager"), settings={"pass_name": "bitwise_models:tanh_off_by_a_little"})
    assert broken.outcome == "failed"
    assert "first node whose bits differ: tanh (aten.tanh.default)" in repr(broken)


def test_inductor_computes_each_graph_by_what_it_made_of_that_graph() -> None:
    """Another factor gives other bits, those of the graph as it is. Without C++: inductor's code calls kernels of ATen."""
    given = torch.randn(64, generator=torch.Generator().manual_seed(0))
    right, wrong = (make_fx(lambda x: [torch.tanh(x).square()])(given) for _ in range(2))
    tanh_off_by_a_little(wrong, ()).recompile()
    (expected,), (off,) = right(given), wrong(given)
    assert not torch.equal(expected, off)
    runs = [CompiledGraph(graph, [], mock.Mock(), "step", "inductor") for graph in (right, wrong)]
    with torch._inductor.config.patch(WITHOUT_CODE):
        (compiled,), (other,) = (run.call("step", run.graph, given) for run in runs)
    assert torch.equal(compiled, expected)
    assert torch.equal(other, off)


def test_a_compiled_update_has_the_learning_rate_of_each_step() -> None:
    """Optimizers that are not fused read it as a number."""
    graph = fx.Graph()
    weight, rate = graph.placeholder("weight"), graph.placeholder("rate")
    number = graph.call_function(torch.ops.aten._local_scalar_dense.default, (rate,))
    graph.output([graph.call_function(torch.ops.aten.mul.Tensor, (weight, number))])
    run = CompiledGraph(fx.GraphModule(torch.nn.Module(), graph), [], mock.Mock(), "step", "aot_eager")
    for value in (0.5, 0.25):
        (found,) = run.call("step", run.graph, torch.ones(4), torch.tensor(value))
        assert found.tolist() == [value] * 4


CASTING = """
[model]
factory = "suites.checks.bitwise_models:casting"
batch = "suites.checks.bitwise_models:casting_batch"
loss = "suites.checks.bitwise_models:casting_loss"
[parallel]
dp_shard = 2
param_dtype = "bfloat16"
reduce_dtype = "float32"
[bucket]
plan = ["0", "1", "2"]
[optimizer]
factory = "torch.optim:SGD"
args = { lr = 0.125 }
[run]
compiler = "inductor"
steps = 2
timeout_s = 300
"""


@needs_compiler
def test_inductor_gives_the_same_bits_of_casts_and_plain_updates_its_order_is_told_and_eager_compiles_nothing(
    pools: Pools, tmp_path: Path
) -> None:
    (plan,) = parse_plans(CASTING, tmp_path / "plan.toml")
    run = PlanRun(plan, RunSettings(tmp_path, tmp_path / "golden", tmp_path / "artifacts"), pools)
    verdict = run.check("bitwise")
    assert verdict, repr(verdict)
    assert "both compiled by inductor, on 2 ranks in 2 steps over gloo; inductor launches " in verdict.summary
    assert re.search(
        r"launches (no later than the graph|later than the graph: before wait \d of \d+ it has \d launch(es)?, the graph \d);",
        verdict.summary,
    )
    verdict = run.check("eager")
    assert verdict, repr(verdict)
    assert "compiled" not in verdict.summary


def test_without_what_compiles_it_is_skipped_by_name(bitwise: Bitwise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    verdict = bitwise(run=compiled_by("inductor"))
    assert verdict.outcome == "skipped"
    assert verdict.summary == (
        '[run] compiler = "inductor" writes C++, and no-such-compiler is not here to compile it; install it, or name another '
        "in CXX"
    )
    assert lacks_compiler("aot_eager") == ""


def calls(short: str) -> list[str]:
    return [WORDS[one] for one in short]


@pytest.mark.parametrize(
    ("emitted", "graph", "said"),
    [
        ("LLwLwRw", "LLwLwRw", ""),
        ("LLLwwRw", "LLwLwRw", ""),
        ("LwLwLRw", "LLwLwRw", "before wait 1 of 3 it has 1 launch, the graph 2"),
        ("LLwwLRw", "LLwLwRw", "before wait 2 of 3 it has 2 launches, the graph 3"),
    ],
)
def test_a_launch_that_comes_later_is_found_and_an_earlier_one_is_no_loss(emitted: str, graph: str, said: str) -> None:
    assert launched_later(calls(emitted), calls(graph)) == said
    assert other_launches(calls(emitted), calls(graph)) == ""


def test_a_launch_that_is_gone_or_new_is_named() -> None:
    assert other_launches(calls("LwRw"), calls("LLwwRw")) == "it calls all_gather_into_tensor 1 times, the graph 2"


def test_launches_are_read_where_the_code_calls_them() -> None:
    code = """
        # Topologically Sorted Source Nodes: [all_reduce], Original ATen: [_c10d_functional.all_reduce]
        torch.ops._c10d_functional.all_reduce_.default(buf0, 'sum', '0')
        buf4 = torch.ops._c10d_functional.all_gather_into_tensor.default(buf3, 2, '0')
        assert_size_stride(buf4, (8, 8), (8, 1), 'torch.ops._c10d_functional.all_gather_into_tensor.default')
        torch.ops._c10d_functional.wait_tensor.default(buf4)
    """
    assert launches_in([code]) == ("all_reduce", "all_gather_into_tensor", "wait_tensor")


COMPILED = '[run]\ncompiler = "inductor"\n'


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("[checks]\nbitwise = false", "is what bitwise runs, and checks.bitwise is false; leave one of them out"),
        (
            '[[optimizer]]\nfactory = "torch.optim:SGD"\n[[transform]]\nname = "next_iteration"\nargs = { entries = ["a"] }',
            "compiles a step of one graph, and next_iteration makes several of it; leave one of them out",
        ),
    ],
)
def test_a_compiler_that_has_nothing_to_compile_is_refused(table: str, said: str) -> None:
    assert refusal(MODEL, PARALLEL, BUCKET, COMPILED, table) == f'[run] compiler = "inductor" {said}'
