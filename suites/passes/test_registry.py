"""Passes of others: found by name, given a plan of modules, and answered for in one sentence."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from dataclasses import replace

import pytest
from torch import fx

from pytest_fxbucket.compat import torch_pass
from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.errors import FxbucketError, PassError, PlanError
from pytest_fxbucket.fuzz.program import aten
from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.passes.new_nodes import NodeMaker
from pytest_fxbucket.passes.packers import Packing, Unpack, pack
from pytest_fxbucket.passes.registry import Bucketed, PassJob, module_plans, run_pass
from pytest_fxbucket.plan.selectors import ResolvedEntry
from pytest_fxbucket.step.roles import Parameter
from suites.passes.bucketing import passed, world_of

HERE = "suites.passes.test_registry:"


def run(name: str, case: str = "late", *, twice: bool = False, **options: object) -> Bucketed:
    world = world_of(case, **options)
    job = PassJob(world.step(0), "joint", world.reading(0)["joint"], world.plan, world.resolution.entries, twice=twice)
    with fake_world(0, 4):
        return run_pass(name, job)


def plans_of(case: str, entries: list[str], unplanned: str = "error") -> list[str | list[str]]:
    world = world_of(case, entries=entries, unplanned=unplanned)
    return module_plans(world.resolution.entries, world.step(0).parameters)


@pytest.mark.parametrize(
    ("case", "entries", "plans"),
    [
        (
            "llama",
            ["tok_embeddings", "layers.*", "norm+output"],
            ["tok_embeddings", "layers.0", "layers.1", ["norm", "output"]],
        ),
        ("llama", ["tok_embeddings", "layers.0+layers.1+norm", "output"], ["tok_embeddings", ["layers", "norm"], "output"]),
        ("tied", ["tok_embeddings", "layers", "norm"], ["tok_embeddings", "layers", "norm"]),
        ("tied", ["output", "layers", "norm"], ["tok_embeddings", "layers", "norm"]),
        (
            "late",
            ["layers.0.first", "layers.0.second+layers.1", "layers.2"],
            ["layers.0.first", ["layers.0.second", "layers.1"], "layers.2"],
        ),
        (
            "linears",
            ["layers.0.weight+layers.0.bias", "layers.1", "layers.[2-3]"],
            ["layers.0", "layers.1", "layers.2", "layers.3"],
        ),
    ],
)
def test_an_entry_is_given_as_the_fewest_modules_that_hold_it(
    case: str, entries: list[str], plans: list[str | list[str]]
) -> None:
    assert plans_of(case, entries) == plans


def test_what_is_left_for_root_is_given_as_modules_too() -> None:
    assert plans_of("llama", ["layers.0", "layers.1"], "root") == ["layers.0", "layers.1", ["tok_embeddings", "norm", "output"]]


def test_a_parameter_of_the_root_module_is_refused_by_its_name() -> None:
    step = world_of("linears").step(0)
    (first, *_) = step.parameters
    root = Parameter("scale", (), first.shape, first.shard_shape, first.dtype, True)
    with pytest.raises(PassError, match=r"^parameter scale belongs to the root module, which a plan of modules cannot name$"):
        module_plans([ResolvedEntry("scale", ("scale",))], [root, *step.parameters])


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed: nothing to do without it")
def test_torch_s_pass_runs_without_triton() -> None:
    theirs = run("torch")
    ours = passed("late")
    assert theirs.report is None
    assert theirs.modules == ("torch._inductor.fx_passes.bucketing",)
    kinds = [Counter(kind for node in graph.nodes if (kind := launch_kind(node))) for graph in (theirs.graph, ours.graph)]
    assert kinds == [
        {"all_gather": 3, "reduce_scatter": 3},  # it takes the gathers of forward and backward together
        {"all_gather": 6, "reduce_scatter": 3},
    ]


def test_torch_s_pass_is_answered_for_when_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_triton(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(torch_pass, "torch_manual_overlap_bucketing", without_triton)
    with pytest.raises(PassError, match=r"^pass torch raised ModuleNotFoundError.*: No module named 'triton'$"):
        run("torch")


def test_a_pass_of_a_user_is_found_by_its_name() -> None:
    step = world_of("late").step(0)
    assert str(run("foreign_passes:same").graph) == str(step.graphs["joint"].graph)
    assert run("foreign_passes:same").modules == ("foreign_passes",)


@pytest.mark.parametrize(
    ("name", "kind", "sentence"),
    [
        ("foreign_passes:sane", PlanError, 'has no "sane"; did you mean "same"?'),
        ("foreign_passes:raises", PassError, "pass foreign_passes:raises raised KeyError at "),
        ("foreign_passes:returns_none", PassError, "returned a NoneType, expected a GraphModule"),
        ("foreign_passes:takes_one_argument", PassError, "raised TypeError"),
        ("foreign_passes:clears_the_graph", PassError, "raised ValueError"),
    ],
)
def test_a_pass_that_cannot_be_run_is_said_in_one_sentence(name: str, kind: type[FxbucketError], sentence: str) -> None:
    graph = world_of("late").step(0).graphs["joint"].graph
    before = str(graph)
    with pytest.raises(kind) as error:
        run(name)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert str(graph) == before


def copying(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Unpack]:
    return pack(make, replace(bucket, inputs=tuple(make(aten.clone.default, tensor) for tensor in bucket.inputs)))


def copying_in_tests(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Unpack]:
    return (copying if "PYTEST_CURRENT_TEST" in os.environ else pack)(make, bucket)


def copying_each_second_time(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Unpack]:
    _calls.append(None)
    return (copying if len(_calls) // 3 % 2 else pack)(make, bucket)


def breaking_outside_of_tests(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Unpack]:
    return pack(make, bucket) if "pytest" in sys.modules else (bucket.inputs[0], None)  # type: ignore[return-value]  # so it is


_calls: list[None] = []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("copying_in_tests", "makes another graph of the same one where no variable of the environment is CI or begins"),
        ("copying_each_second_time", "makes another graph of the same one when it is called again: it goes by chance, by time"),
        ("breaking_outside_of_tests", "where (packed node, unpack) was expected, where pytest is not imported"),
    ],
)
def test_a_packer_of_ones_own_that_goes_by_more_than_the_bucket_is_refused(name: str, words: str) -> None:
    assert str(run("manual", packer=HERE + "copying", twice=True).graph).count("clone") > 4
    with pytest.raises(PassError) as caught:
        run("manual", packer=HERE + name, twice=True)
    assert str(caught.value).startswith(f'packer "{HERE}{name}" ')
    assert words in str(caught.value)
    assert len(run("manual", packer=HERE + name).graph.nodes) > 4  # where it is only used, it is called once
