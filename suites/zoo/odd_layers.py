"""Odd but ordinary modules: torch's own layers, and how factories make them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from suites.zoo.draws import mean_square, tokens, vectors
from suites.zoo.odd_modules import DIM, Block, OddShelf, rows, sequence, stack

SHELF = OddShelf(__name__)
images = vectors(4, 3, 8, 8)


def transformer() -> nn.Module:
    return nn.Transformer(DIM, 4, 2, 2, 32, batch_first=True)


SHELF.add(
    "nn_transformer",
    transformer,
    lambda g: (torch.randn(2, 6, DIM, generator=g), torch.randn(2, 5, DIM, generator=g)),
    mean_square,
)
SHELF.add(
    "nn_encoder",
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, 4, 32, batch_first=True), 2),
    sequence,
    mean_square,
)


class Rnn(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.block, self.rnn = Block(), kind(DIM, DIM, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(self.block(x))[0]
        return out


def without_onednn() -> AbstractContextManager[None]:
    """Recurrent layers by the steps that they consist of."""
    flags: AbstractContextManager[None] = torch.backends.mkldnn.flags(enabled=False)
    return flags


ONEDNN = "a recurrent layer is traced as the steps that it consists of, which plain eager leaves to oneDNN"
SHELF.add("lstm", lambda: Rnn(nn.LSTM), sequence, mean_square, rounds=ONEDNN, as_traced=without_onednn)
SHELF.add("gru", lambda: Rnn(nn.GRU), sequence, mean_square)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 2, stride=2), nn.GroupNorm(3, 3)
    )


SHELF.add("batch_norm", convolutional, images, mean_square, refused={"bf16": "batch_norm.* eagerly too"})
SHELF.add(
    "weighted_bag",
    lambda: nn.Sequential(nn.EmbeddingBag(32, DIM, mode="mean"), Block()),
    lambda g: (tokens(g, 4, 3, high=32),),
    mean_square,
)
SHELF.add(
    "bilinear",
    lambda: nn.Bilinear(DIM, DIM, 8),
    lambda g: (torch.randn(4, DIM, generator=g), torch.randn(4, DIM, generator=g)),
    mean_square,
)
SHELF.add(
    "norms",
    lambda: nn.Sequential(Block(), nn.RMSNorm(DIM), Block(), nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, affine=True)),
    rows,
    mean_square,
)

SHELF.add(
    "to_bfloat16", lambda: stack().to(torch.bfloat16), lambda g: (torch.randn(4, DIM, generator=g).bfloat16(),), mean_square
)
SHELF.add("half", lambda: stack().half(), lambda g: (torch.randn(4, DIM, generator=g).half(),), mean_square)
SHELF.add("double", lambda: stack().double(), lambda g: (torch.randn(4, DIM, generator=g).double(),), mean_square)


def truncated() -> nn.Module:
    made = stack()
    for module in made.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.orthogonal_(module.weight)
            nn.init.kaiming_uniform_(module.weight)
    return made


def emptied() -> nn.Module:
    with torch.device("meta"):
        made = stack()
    made.to_empty(device="cpu")
    for parameter in made.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3)
    return made


def depends_on_value() -> nn.Module:
    count = int(torch.tensor([1, 2]).sum().item())
    made = stack(count)
    if made[0].up.weight.abs().max() > 10:
        raise ValueError("badly initialised")
    return made


SHELF.add("trunc_normal", truncated, rows, mean_square)
SHELF.add("to_empty", emptied, rows, mean_square)
SHELF.add("reads_value_in_init", depends_on_value, rows, mean_square)

torch.manual_seed(7)
_BUILT = stack()


def built_at_import() -> nn.Module:
    return _BUILT


SHELF.add("built_at_import", built_at_import, rows, mean_square)


@SHELF.odd(lambda: {"layers": nn.ModuleDict({str(number): Block() for number in range(3)})})
def module_dict(m: Any, x: Tensor) -> Tensor:
    """Layers by name, as torchtitan has them."""
    x = m.blocks(x)
    for layer in m.layers.values():
        x = layer(x)
    return x
