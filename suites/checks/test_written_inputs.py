"""A bare graph's inputs are compared too, as the step left them."""

from __future__ import annotations

import torch
from torch import fx

from pytest_fxbucket.checks.bitwise.job import BitwiseTask, run
from pytest_fxbucket.plan.schema import Parallel
from pytest_fxbucket.step.mesh import shard_mesh
from pytest_fxbucket.step.portable import encode_module
from pytest_fxbucket.step.roles import Value


def writing(amount: float) -> fx.GraphModule:
    graph = fx.Graph()
    given = graph.placeholder("given")
    graph.call_function(torch.ops.aten.add_.Tensor, (given, amount))
    graph.output([graph.call_function(torch.ops.aten.zeros.default, ([1],))])
    return fx.GraphModule(torch.nn.Module(), graph)


def task(amount: float) -> BitwiseTask:
    one = (Value("value", "0", (2,), torch.float32),)
    return BitwiseTask(
        unbucketed=encode_module(writing(1.0)),
        bucketed=encode_module(writing(amount)),
        steps=1,
        inputs=one,
        outputs=one,
        model=None,
        example_inputs=(torch.ones(2),),
        seed=0,
        where="plan.toml",
        mesh=shard_mesh(1),
        parallel=Parallel(),
        parameters=(),
        optimizing=None,
    )


def test_a_pass_that_writes_something_else_to_an_input_is_seen() -> None:
    assert run(0, 1, task(1.0)).differences == []
    assert [(d.what, d.elements) for d in run(0, 1, task(2.0)).differences] == [("input", 2)]
