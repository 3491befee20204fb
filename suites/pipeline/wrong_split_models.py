"""A Llama whose three stages read one weight, change a buffer, and pass two values of one shape behind the first cut."""

from __future__ import annotations

import torch
from torch import Tensor

from fixtures.models.llama import VOCAB, Llama, LlamaShape, RMSNorm

MICROBATCHES = 4
FACTOR = 1.5


class Counting(RMSNorm):
    """A norm that keeps a buffer of what it saw."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.add_(x.detach().float().mean())
        return super().forward(x)


def build() -> Llama:
    """Two layers of width 16, embeddings tied; three norms, one in each stage, have one weight. Hooks flip tokens and scale."""
    model = Llama(LlamaShape(layers=2, dim=16, heads=2, kv_heads=1, tied=True))
    first, second = model.layers
    second.attention_norm = Counting(16)
    second.attention_norm.weight = second.ffn_norm.weight = first.attention_norm.weight
    model.register_forward_pre_hook(lambda _, args: (args[0].flip(1),))
    model.register_forward_hook(lambda _, args, output: output * FACTOR)
    return model


def batch(rank: int, step: int) -> tuple[Tensor]:
    """Eight rows of tokens, another draw for each rank and step."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    return (torch.randint(0, VOCAB, (2 * MICROBATCHES, 8), generator=generator),)
