"""Small models, batches and losses of the capture suite, imported by name as a plan's are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Residual(nn.Module):
    """Blocks whose parameters backward reads all, but the biases."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def residual(layers: int = 3, width: int = WIDTH) -> nn.Module:
    return Residual(layers, width)


class Rooted(nn.Sequential):
    """A module that is called ``root``, behind another and before a head."""

    def __init__(self) -> None:
        parts = {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("first", "root", "head")}
        super().__init__(OrderedDict(parts))


def frozen() -> nn.Module:
    model = Residual(2, WIDTH)
    model.layers[0].requires_grad_(False)
    return model


class Calls(nn.Module):
    """A function of the module and its input, as a forward."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def asks_a_value(m: Any, x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x


def leaves_torch(m: Any, x: Tensor) -> Tensor:
    return x + float(x.detach().numpy().sum())


def selects(m: Any, x: Tensor) -> Tensor:
    return x[x > 0].sum() + x


def adds_a_buffer(m: Any, x: Tensor) -> Tensor:
    m.register_buffer("late", x.detach().mean(0))
    return x


def multiplies_by_a_literal(m: Any, x: Tensor) -> Tensor:
    return x * torch.tensor([0.5] * WIDTH)


def scatters(m: Any, x: Tensor) -> Tensor:
    return torch.zeros(x.shape).index_add(0, torch.arange(x.shape[0]), x)


def reads_a_table(m: Any, x: Tensor) -> Tensor:
    """A tensor of this file that the batch makes."""
    return x * TABLE


def loses(m: Any, x: Tensor) -> Tensor:
    raise KeyError("lost")


def behind(kind: str) -> nn.Module:
    """A function of this file, or a module, behind a linear."""
    found = globals()[kind]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), found() if isinstance(found, type) else Calls(found))


class Odd(Residual):
    """One parameter that forward does not read."""

    def __init__(self) -> None:
        super().__init__(1, WIDTH)
        self.spare = nn.Parameter(torch.ones(4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def uneven() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def two_dtypes() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), Calls(lambda m, x: x.float()), nn.Linear(WIDTH, WIDTH))


def bfloat16() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)


def batch(rank: int, step: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    return (torch.randn(4, WIDTH, generator=generator),)


def keyword_batch(rank: int, step: int) -> dict[str, Tensor]:
    return {"x": batch(rank, step)[0]}


def loss(output: Tensor, batch: Any) -> Tensor:
    return output.float().square().mean()


def loss_of_batch(output: Tensor, batch: Any) -> Tensor:
    (x,) = batch
    assert x.dtype == torch.float32, "the loss gets the batch as the user gave it"
    return (output.float() - x).square().mean()


class Scalar(nn.Linear):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))


def raises() -> nn.Module:
    raise ValueError("no such width")  # the line that the sentence must name


def wrong_width() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Linear(7, WIDTH))


def no_module() -> int:
    return 3


def a_number(rank: int, step: int) -> int:
    return 3


def raising_batch(rank: int, step: int) -> tuple[Tensor]:
    raise OSError("no data here")


def vector_loss(output: Tensor, batch: Any) -> Tensor:
    return output.sum(0)


def number_loss(output: Tensor, batch: Any) -> float:
    return 1.0


def loss_without_parameters(output: Tensor, batch: Any) -> Tensor:
    return batch[0].sum()


def raising_loss(output: Tensor, batch: Any) -> Tensor:
    raise IndexError("no labels")


def growing_batch(rank: int, step: int) -> tuple[Tensor]:
    return (torch.ones(4 + rank, WIDTH),)


def numbered_batch(rank: int, step: int) -> dict[str, Any]:
    return {"x": batch(rank, step)[0], "step": step}


def half_batch(rank: int, step: int) -> tuple[Tensor]:
    return (batch(rank, step)[0].bfloat16(),)


class Catches(nn.Module):
    """Catches what its child raises, and then fails by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Calls(loses)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.child(x)
        except KeyError:
            pass
        raise ValueError("and then this")


class Repeated(nn.Module):
    """One layer, called three times: backward reads its weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return x


class Heads(nn.Module):
    """Two heads side by side, each of a third of the width."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 6)
        self.out = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        heads = inner.view(x.shape[0], 2, 3)
        return self.out(torch.tanh(heads).flatten(1))


class Rows(nn.Module):
    """Experts: one row of each parameter for each."""

    def __init__(self, experts: int, biases: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(experts, WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.zeros(biases, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight) + self.bias


class Routed(nn.Module):
    """Gives its experts the batch once for each of ``seen``."""

    def __init__(self, experts: int = 4, biases: int = 4, seen: int = 4, noted: bool = False) -> None:
        super().__init__()
        self.seen = seen
        self.experts = Rows(experts, biases)
        if noted:
            self.experts.register_buffer("scales", torch.ones(experts))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x.expand(self.seen, *x.shape))


class RoutedByMethod(Routed):
    """Does not call the module of experts, but a method of its class."""

    def forward(self, x: Tensor) -> Tensor:
        return Rows.forward(self.experts, x.expand(self.seen, *x.shape))


class RoutedWithWeights(Routed):
    """Gives its experts weights beside the tokens, as those of transformers get them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x.expand(self.seen, *x.shape), x.sum(-1))


class RoutedAndPenalised(Routed):
    """Reads the weight of all experts, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.experts.weight.square().sum()


class RoutedTwice(Routed):
    """What experts compute is computed again in backward, by a function within their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Again(4, 4)


class Again(Rows):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return made


def two_blocks() -> nn.Module:
    """Blocks of two linears."""
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    return nn.Sequential(*blocks)


def embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


class Upcast(nn.Module):
    """Gives float32, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, more: dict[str, Tensor] | None = None) -> Tensor:
        return torch.tanh(self.linear(x) + (more["shift"] if more else 0)).float()


class FloatsBetween(nn.Module):
    """float32 between layers, with or without a dict beside it."""

    def __init__(self, named: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Upcast() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.named = named

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x=x, more={"shift": x.float() / 3}) if self.named else layer(x)
        return self.head(x)


def norms_in_float32() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Calls(lambda m, x: x.float()), nn.LayerNorm(WIDTH))


class HalfNorm(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16())


class Casts(nn.Module):
    """Reads its weights in another dtype than they are gathered in: by a cast, by autocast, and row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.rows = nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = nn.functional.linear(x.double(), self.second.weight.double()).to(x.dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.second(x).float()
        for row in self.rows:
            x = torch.tanh(x @ row)
        return x


class HoldsItself(nn.Linear):
    """A tensor in a dict that contains itself, in a list that does."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.tables: dict[str, Any] = {"scale": torch.full((WIDTH,), 2.0)}
        self.tables["all"] = [self.tables]
        self.tables["all"].append(self.tables["all"])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.tables["scale"])


def batch_with_table(rank: int, step: int) -> tuple[Tensor]:
    global TABLE
    TABLE = torch.full((WIDTH,), 2.0)
    return batch(rank, step)


class Attention(nn.Module):
    """Scaled dot product attention of one head, and a linear."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout, self.inner = nn.Linear(8, 8), dropout, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x)[None, None]
        attended: Tensor = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.dropout)
        return self.inner(attended[0, 0])


def attention(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Attention(dropout))
