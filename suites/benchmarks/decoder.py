"""A decoder of which graphs of any size are made: nine parameters a layer, some 290 nodes of the joint graph."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from fixtures.models.llama import VOCAB, FeedForward, RMSNorm, batch, loss
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema import Plan

__all__ = ["batch", "build", "loss", "plan_of"]

DIM, HEADS, RANKS = 32, 2, 8


class Attention(nn.Module):
    """Causal attention of all heads, without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        scores = torch.matmul(query, key.transpose(2, 3)) * (DIM // HEADS) ** -0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        mixed: Tensor = self.wo(torch.matmul(weights, value).transpose(1, 2).flatten(2))
        return mixed


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(DIM), Attention()
        self.ffn_norm, self.feed_forward = RMSNorm(DIM), FeedForward(DIM, 2 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Decoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.output(x)
        return logits


def build(layers: int) -> Decoder:
    return Decoder(layers)


def plan_of(layers: int) -> Plan:
    """The plan that buckets each layer, on a mesh of 8 ranks."""
    text = f"""
[model]
factory = "suites.benchmarks.decoder:build"
args = {{ layers = {layers} }}
batch = "suites.benchmarks.decoder:batch"
loss = "suites.benchmarks.decoder:loss"

[parallel]
dp_shard = {RANKS}

[bucket]
plan = ["tok_embeddings", "layers.[0-{layers - 1}]", "output"]
"""
    return parse_plans(text, Path("decoder.toml"))[0]
