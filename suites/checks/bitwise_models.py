"""A small MLP, batches that cannot tell right from wrong, and passes that change one thing in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from fixtures.models.llama_sdpa import batch as tokens

ROWS, WIDTH = 3, 8


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Mlp(nn.Module):
    """Executed in another order than registered: ``scale`` last."""

    def __init__(self, used: float) -> None:
        super().__init__()
        self.scale = Scale()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        out: Tensor = self.down(torch.tanh(hidden)) + self.used * self.scale(hidden)
        return out


class Rows(nn.Module):
    """Each of a few rows is read often; gradients of the reads are added by ``index_put_``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8 * 180).view(8, 180))
        draw = torch.Generator().manual_seed(1)
        self.register_buffer("places", torch.randint(0, 8, (4096,), generator=draw))
        self.register_buffer("factors", torch.randn(4096, 180, generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[self.places] * self.factors + x.mean()


class Picking(nn.Module):
    """Reads rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.scale = Rows(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.rows(self.scale(x))
        return made


def build(used: float = 1.0) -> Mlp:
    return Mlp(used)


def build_by_seed(used: float = 1.0) -> Mlp:
    """With seed 7 the weights of ``down`` and the use of ``scale`` are zero, and so are gradients."""
    model = Mlp(0.0 if torch.initial_seed() == 7 else used)
    if torch.initial_seed() == 7:
        nn.init.zeros_(model.down.weight)
    return model


def build_by_rank() -> Mlp:
    model = Mlp(1.0)
    nn.init.constant_(model.scale.weight, 1.0 + torch.distributed.get_rank())
    return model


class Beside(Mlp):
    """``scale`` beside the two linears, which can be parted then."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x))) + self.used * self.scale(x)
        return out


def build_beside() -> Mlp:
    return Beside(1.0)


def build_deeper(used: float = 1.0) -> nn.Module:
    model = Mlp(used)
    model.up = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    return model


class Drawing(Mlp):
    """Drops out in front of all else, and counts its calls."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        return super().forward(self.drop(x))


def build_drawing() -> Mlp:
    return Drawing()


class WithNone(Mlp):
    """Has a parameter of no elements, as prompt tokens that nobody asked for."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.up.prompt = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x, self.up.prompt]))


def build_with_none() -> Mlp:
    return WithNone()


class Stack(nn.Module):
    """Four linears, of which the last two are to be updated a call late."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


def build_stack() -> Stack:
    return Stack()


def batch(rank: int, step: int) -> tuple[Tensor]:
    return (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)),)


def equal_batch(rank: int, step: int) -> tuple[Tensor]:
    return batch(0, step)


def equal_tokens(rank: int, step: int) -> object:
    return tokens(0, step)


def infinite_batch(rank: int, step: int) -> tuple[Tensor]:
    (x,) = batch(rank, step)
    return (x / 0,)


def repeated_batch(rank: int, step: int) -> tuple[Tensor]:
    """One row in the place of all."""
    (x,) = batch(rank, step)
    return (x[:1].expand(ROWS, WIDTH),)


def loss(output: Tensor, batch: tuple[Tensor]) -> Tensor:
    return output.square().mean()


def tanh_off_by_a_little(gm: fx.GraphModule, plans: Sequence[object]) -> fx.GraphModule:
    """The argument of tanh is another one: tanh is the first node of both graphs that differs."""
    node = next(node for node in gm.graph.nodes if node.target is torch.ops.aten.tanh.default)
    with gm.graph.inserting_before(node):
        other = gm.graph.call_function(torch.ops.aten.mul.Tensor, (node.args[0], 1 + 2**-20))
        other.meta = dict(node.meta)
    node.replace_input_with(node.args[0], other)
    return gm


def gradient_off_by_a_little(gm: fx.GraphModule, plans: Sequence[object]) -> fx.GraphModule:
    """One of its own nodes is wrong, so no node of both graphs differs."""
    output = gm.graph.output_node()
    gradient = next(node for node in reversed(output.all_input_nodes) if node.meta["val"].ndim)
    with gm.graph.inserting_before(output):
        other = gm.graph.call_function(torch.ops.aten.mul.Tensor, (gradient, 1 + 2**-20))
        other.meta = dict(gradient.meta)
    output.replace_input_with(gradient, other)
    return gm


def other_loss(output: Tensor, batch: tuple[Tensor]) -> Tensor:
    return output.square().sum()


def lost_count(gm: fx.GraphModule, plans: Sequence[str | list[str]]) -> fx.GraphModule:
    """Without the write to a buffer."""
    (count,) = [node for node in gm.graph.nodes if node.target is torch.ops.aten.add_.Tensor and node.args[1] == 1]
    count.replace_all_uses_with(count.args[0])
    gm.graph.erase_node(count)
    return gm


class Cast(nn.Module):
    """A block that inductor fuses otherwise where its parameters come out of a bucket: in low precision it rounds otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def casting() -> nn.Module:
    return nn.Sequential(Cast(), Cast(), nn.LayerNorm(16))


def casting_batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


def casting_loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    wide = output.float()
    return (wide**3 + wide).exp().clamp(max=9).mean()
