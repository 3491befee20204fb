"""Written in place in parts, drawn in order of memory, or seen as real numbers has eager's bits in a captured step."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial, wraps
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.train_step import capture_step
from suites.train_step.step_twins import Optimizers, Step, Twins, sgd

DIM = 24


def squared(model: nn.Module, optimizers: Optimizers) -> Step:
    """A step whose loss is the mean square of what the model gives."""

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizers[0].zero_grad()
        loss = model(x).abs().square().mean()
        loss.backward()
        optimizers[0].step()
        return loss.detach()

    return step


class Called(nn.Module):
    """A linear layer, and what ``call`` makes of its output."""

    def __init__(self, call: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(DIM, DIM), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, self.linear(x))


def gated(model: Called, h: torch.Tensor) -> torch.Tensor:
    h[..., :8].add_(0.1).sigmoid_()
    return h


def dropped_in_channels(model: Called, h: torch.Tensor) -> torch.Tensor:
    return functional.dropout(h.transpose(0, 1), 0.3, model.training)


def turned_in_place(model: Called, h: torch.Tensor) -> torch.Tensor:
    turned = h.add(1).transpose_(0, 1).unsqueeze_(0)
    turned.squeeze_(0).mul_(2)
    return turned + model.linear.weight.sin().t_()[0]


def pooled_in_channels_last(model: Called, h: torch.Tensor) -> torch.Tensor:
    return functional.adaptive_avg_pool2d(h.view(4, 5, 4, 6).contiguous(memory_format=torch.channels_last), 1)


def made_into(model: Called, h: torch.Tensor) -> torch.Tensor:
    one, noise = torch.eye(DIM, out=h.new_empty(DIM, DIM)), torch.rand(DIM, out=h.new_empty(DIM))
    return h @ one * noise + torch.arange(0, DIM, out=torch.empty(DIM, dtype=torch.float64)).to(h.dtype)


def of_functional_gradient(model: Called, h: torch.Tensor) -> torch.Tensor:
    slope: torch.Tensor = torch.func.grad(lambda one: model.linear(one).square().sum())(h.detach())
    return h + slope


class Rotated(Called):
    def __init__(self) -> None:
        super().__init__(lambda model, h: torch.view_as_complex(h.view(*h.shape[:-1], -1, 2)) * model.turn)
        self.turn = nn.Parameter(torch.randn(DIM // 2, dtype=torch.complex64))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "an encoder of torch with dropout": lambda: nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, 0.1, batch_first=True),
    "a recurrent layer": lambda: nn.Sequential(nn.GRU(DIM, 8), First(), nn.Linear(8, DIM)),
    "a recurrent layer over batches": lambda: nn.Sequential(nn.GRU(DIM, DIM, batch_first=True), First()),
    "another shape in place": lambda: Called(turned_in_place),
    "pooling of channels last": lambda: Called(pooled_in_channels_last),
    "factories with out=": lambda: Called(made_into),
    "a gate in place": lambda: Called(gated),
    "dropout of a transposed tensor": lambda: Called(dropped_in_channels),
    "a gradient within forward": lambda: Called(of_functional_gradient),
}


class First(nn.Module):
    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return both[0]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def inputs(number: int) -> torch.Tensor:
    return torch.randn(4, 5, DIM, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_eager(name: str) -> None:
    twins = Twins(sgd, squared, partial(seeded, MODELS[name]))
    for number in range(3):
        twins.same(inputs(number), seed=number)
    assert twins.step.traces == 1


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "RMSprop", "Adamax"])
def test_an_optimizer_that_sees_complex_parameters_as_real_ones_trains_as_eager(name: str) -> None:
    kind = getattr(torch.optim, name)
    twins = Twins(lambda model: kind(model.parameters(), lr=0.01), squared, partial(seeded, Rotated))
    for number in range(3):
        twins.same(inputs(number), seed=number)


def resized(model: Called, h: torch.Tensor) -> torch.Tensor:
    return h.detach().clone().resize_(2, 2)


def looked_up_sparsely(model: Called, h: torch.Tensor) -> torch.Tensor:
    return functional.embedding(torch.tensor([0, 1]), model.linear.weight, padding_idx=0, sparse=True)


def randomly_signed(model: Called, h: torch.Tensor) -> torch.Tensor:
    return h * torch.empty_like(h).random_(0, 3)


def scaled_by_parameter() -> nn.Module:
    """As one who steps an optimizer for each parameter in a hook."""
    scales: dict[torch.Tensor, float] = {}
    model = Called(lambda model, h: h * scales[model.linear.weight])
    scales[model.linear.weight] = 2.0
    return model


@lru_cache(maxsize=4)
def positions(count: int) -> torch.Tensor:
    return torch.arange(count) / count


class Positioned(Called):
    """Keeps what it computed once in a function's cache, and in a method's behind a wrapper, as transformers does."""

    def __init__(self) -> None:
        super().__init__(lambda model, h: h + positions(DIM) * self.scaled(2))

    def _wrapped(method: Any) -> Any:
        cached = lru_cache(maxsize=4)(method)

        @wraps(method)
        def call(self: Any, *args: Any) -> Any:
            return cached(self, *args)

        return call

    @_wrapped
    def scaled(self, by: int) -> torch.Tensor:
        return torch.full((), 1 / by)


KEPT: dict[int, torch.Tensor] = {}


class Keeps(Called):
    """Keeps what it computed once in dicts by hand: its own, its class's, and one beside it."""

    of_class: ClassVar[dict[int, torch.Tensor]] = {}

    def __init__(self) -> None:
        super().__init__(lambda model, h: h + self.kept(self.own) + self.kept(self.of_class) + self.kept(KEPT))
        self.own: dict[int, torch.Tensor] = {}

    def kept(self, held: dict[int, torch.Tensor]) -> torch.Tensor:
        if DIM not in held:
            held[DIM] = torch.arange(DIM) / DIM
        return held[DIM]


@pytest.mark.parametrize("make", [Positioned, Keeps])
def test_a_cache_of_what_was_computed_once_holds_nothing_fake_behind_a_trace(make: Callable[[], nn.Module]) -> None:
    model = seeded(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = capture_step(squared(model, [optimizer]), model=model, optimizers=[optimizer])
    positions.cache_clear()
    assert step(inputs(0)) == model(inputs(0)).square().mean()
    assert step.traces == 1


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "integers drawn by a name of Python's": (lambda: Called(randomly_signed), "draw integers with torch.randint"),
    "a tensor that is resized": (
        lambda: Called(resized),
        "aten.resize_.default, which makes another shape of a tensor in place",
    ),
    "rows of a sparse gradient": (lambda: Called(looked_up_sparsely), "has sparse=True and a padding_idx"),
    "a dict by parameters": (scaled_by_parameter, "it looks something up by a tensor, and while tracing another stands in"),
    "a lazy module": (lambda: nn.LazyLinear(DIM), "parameter weight is made by a first forward (a lazy module)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_hold_is_one_sentence(name: str) -> None:
    make, says = REFUSED[name]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = capture_step(squared(model, [optimizer]), model=model, optimizers=[optimizer])
    with pytest.raises(CaptureError) as caught:
        step(inputs(0))
    assert says in str(caught.value)


def test_a_layer_that_onednn_would_run_is_traced_without() -> None:
    """Its workspace is nothing that a graph can hold; what it computes by itself rounds otherwise."""
    model = seeded(lambda: nn.Sequential(nn.LSTM(DIM, 8), First()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = capture_step(squared(model, [optimizer]), model=model, optimizers=[optimizer])
    losses = [float(step(inputs(0))) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
