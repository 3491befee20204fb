"""What no split is made of: one sentence each, with the nearest right thing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from pytest_fxbucket.errors import CaptureError, StageError
from pytest_fxbucket.pipeline import split_stages
from suites.pipeline.stage_models import DIM, linears, rows


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.again, self.never, self.nothing = *linears(3), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.again(self.linear(self.nothing(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(DIM, 2)
        self.head.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def refused(sentence: str, model: Any, cuts: Any, batch: Any = None, error: type[Exception] = StageError) -> None:
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        split_stages(model, cuts, rows() if batch is None else batch)


@pytest.mark.parametrize(
    ("cuts", "sentence"),
    [
        ([], 'cuts is an empty list, expected a list of module paths, such as ["blocks"]'),
        ("blocks.0", 'cuts is "blocks.0", expected a list of module paths, such as ["blocks"]'),
        (["blocks.2"], 'cut "blocks.2" is no module of the model; did you mean "blocks.1"?'),
        (
            ["blocks.0.again"],
            'cut "blocks.0.again" is called 2 times in forward, expected once, since a stage ends behind its one call; '
            'cut behind "blocks.0.linear", which ends before its first call, or "blocks.0", which ends behind it',
        ),
        (
            ["blocks.0.never"],
            'cut "blocks.0.never" is never called in forward, expected once, since a stage ends behind its one call; '
            'cut behind "blocks.0", which it is part of',
        ),
        (
            ["blocks"],
            'cut "blocks" is never called in forward, expected once, since a stage ends behind its one call; '
            'cut behind "blocks.1", which is part of it',
        ),
        (
            ["blocks.0", "blocks.1.nothing"],
            'cuts "blocks.0" and "blocks.1.nothing" are at one place: nothing runs between their ends, and the stage '
            "there would be empty; leave one of them out",
        ),
        (
            ["blocks.1", "blocks.0"],
            'cut "blocks.0" stands behind "blocks.1", but the forward ends it before; write the cuts as it runs them: '
            '"blocks.0", "blocks.1"',
        ),
        (
            ["blocks.0.nothing"],
            'nothing runs before the end of cut "blocks.0.nothing", so the first stage would be empty; leave it out',
        ),
        (
            ["blocks.0", "head"],
            'cut "head" cuts nothing off, since nothing of the model runs behind it; leave it out, or cut behind a module that '
            "ends before",
        ),
    ],
)
def test_cuts_that_part_nothing(cuts: Any, sentence: str) -> None:
    refused(sentence, Net(), cuts)


SHARED, LINEAR, OTHER, LAST = linears(4)


@pytest.mark.parametrize(
    ("layers", "instead"),
    [
        ([LINEAR, OTHER, SHARED, SHARED, LAST], 'cut behind "1", which ends before its first call'),
        ([nn.Identity(), SHARED, LINEAR, SHARED], 'cut behind "2", which ends behind its first call'),
        ([SHARED, SHARED], "no module of the model is a place for a cut"),
    ],
    ids=["nothing to cut behind after it", "nothing before it", "alone"],
)
def test_a_cut_behind_a_shared_module_has_those_next_to_it_that_part_the_model(layers: list[nn.Module], instead: str) -> None:
    cut = str(layers.index(SHARED))
    refused(
        f'cut "{cut}" is called 2 times in forward, expected once, since a stage ends behind its one call; {instead}',
        nn.Sequential(*layers),
        [cut],
    )


def test_a_cut_that_is_never_called_and_in_nothing_that_is() -> None:
    model = Net()
    model.never = nn.Linear(DIM, DIM)
    refused(
        'cut "never" is never called in forward, expected once, since a stage ends behind its one call; cut behind one that '
        'is, such as "blocks.0"',
        model,
        ["never"],
    )


def test_what_is_scripted_cannot_be_seen_and_what_is_compiled_can() -> None:
    layers = [nn.Linear(DIM, DIM), nn.Sequential(nn.ReLU(), nn.Linear(DIM, DIM)), nn.ReLU()]
    refused(
        "module 1 is scripted by torch.jit, and nothing in it can be traced; leave that out",
        nn.Sequential(layers[0], torch.jit.script(layers[1]), layers[2]),
        ["1.0"],
        error=CaptureError,
    )
    compiled = nn.Sequential(layers[0], torch.compile(layers[1]), layers[2])
    assert split_stages(compiled, ["1._orig_mod.0"], rows())[0].summary.modules == ("0", "1._orig_mod.0")


def test_a_graph_that_says_nothing_of_modules_or_calls_them() -> None:
    model = nn.Sequential(*linears(2))
    refused(
        "no node of the graph says which module it is of, so there is no place to cut at; trace it with module stacks "
        '(meta["nn_module_stack"]), as torch.export does',
        make_fx(model)(*rows()),
        ["0"],
    )
    refused("the graph calls module 0 as a whole, expected a flat graph of operators", fx.symbolic_trace(model), ["0"])


def test_what_is_no_model_and_no_arguments() -> None:
    refused("a value of type function cannot be split, expected a torch.nn.Module", lambda x: x, ["0"])
    refused(
        "example_inputs is a value of type int, expected a tuple of arguments, or a dict of them by name",
        Net(),
        ["blocks.0"],
        3,
    )
    held = "whose tensors no stage would receive; pass tensors, and tuples, lists and dicts of them"
    refused(f"argument ['x'] is a value of type Held, {held}", Net(), ["head"], (Held(torch.ones(4, DIM)),))
    refused("the arguments do not fit forward(x: 'Tensor') -> 'Tensor': missing a required argument: 'x'", Net(), ["head"], {})


class Odd(Net):
    """A net whose forward does something besides."""

    def __init__(self, odd: Any) -> None:
        super().__init__()
        self.odd = odd

    def forward(self, x: Tensor) -> Any:
        x = self.blocks[0](x)
        return self.odd(self, self.blocks[1](x), x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def replaced(model: Any, x: Tensor, _: Tensor) -> Tensor:
    model.head.calls = model.head.calls + 1
    return x


class Held:
    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize(
    ("odd", "error", "sentence"),
    [
        (
            lambda model, x, _: Doubled.apply(x),
            CaptureError,
            "module the root calls Doubled, an autograd.Function, whose backward the operators of its forward do not tell; "
            "write it of torch's operators",
        ),
        (
            lambda model, x, _: checkpoint(model.head, x, use_reentrant=True),
            CaptureError,
            "module the root calls CheckpointFunction, an autograd.Function, whose backward the operators of its forward do "
            "not tell; use_reentrant=False",
        ),
        (
            replaced,
            CaptureError,
            "buffer head.calls is replaced in forward, and a stage writes its own; write it in place, as with calls.copy_()",
        ),
        (
            lambda model, x, _: Held(x),
            StageError,
            "forward gives a value of type Held, which a stage cannot give; let it give tensors, plain values, and tuples, "
            "lists, dicts and dataclasses of them (as with use_cache=False)",
        ),
    ],
)
def test_a_forward_that_operators_do_not_tell(odd: Any, error: type[Exception], sentence: str) -> None:
    refused(sentence, Odd(odd), ["blocks.0"], error=error)


class _NoopSaveInputs(Doubled):
    """As torch before 2.13 has it: it keeps what a checkpoint is given, and nobody reads what it gives."""


def test_a_function_that_only_keeps_its_inputs_is_taken() -> None:
    model = Odd(lambda model, x, _: x + _NoopSaveInputs.apply(x).shape[0])
    assert len(split_stages(model, ["blocks.0"], rows())) == 2


class Counts(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.layers, self.where = linears(2), where
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "both":
            x = self.layers[0](x)
            torch._foreach_add_([x, self.calls], 1.0)
            return self.layers[1](x)
        y = self.layers[1](self.layers[0](x + self.calls))
        (self.calls if self.where == "buffer" else x).add_(1)
        return y


@pytest.mark.parametrize(("where", "named"), [("buffer", "calls"), ("argument", "argument x")])
def test_what_one_stage_writes_and_another_has(where: str, named: str) -> None:
    refused(
        f"{named} is written in place in stage 1 (aten.add_.Tensor) and is in stage 0, too, which has its own; put the cut "
        "where one stage has it alone",
        Counts(where),
        ["layers.0"],
    )


def test_what_is_written_at_once_in_two_stages() -> None:
    refused(
        "aten._foreach_add_.Scalar (_foreach_add_) writes at once what its stage has and what another stage made; write one by "
        "one",
        Counts("both"),
        ["layers.0"],
    )


def test_arguments_that_were_not_traced() -> None:
    stages = split_stages(Net(), ["blocks.0"], rows())
    for given, shown in (
        (torch.randn(3, DIM), "a tensor of [3, 8] in float32"),
        (torch.randn(DIM, 4).t(), "a tensor of [4, 8] in float32 with strides [1, 4]"),
        (None, "None"),
    ):
        sentence = f"argument x is {shown}, but the stages were traced with a tensor of [4, 8] in float32; split"
        with pytest.raises(StageError, match=f"^{re.escape(sentence)} the model for it anew$"):
            stages(given)
