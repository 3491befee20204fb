"""Random training steps, with roles, that gather entries again and again: for each use, in backward, in each microbatch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import fx

from pytest_fxbucket.fuzz.program import Program, aten
from pytest_fxbucket.graph.buckets import GraphAnalysis
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.step.roles import Value

WORLD, COLUMNS = 2, 4
ENTRIES = "abcde"


@dataclass
class DrawnStep:
    """A step out of one seed. What is computed makes no sense as a model; who reads what, and when, does."""

    number: int
    made: Program = field(default_factory=lambda: Program(WORLD))
    parameters: dict[str, fx.Node] = field(default_factory=dict)
    gradients: dict[str, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.number)
        for entry in ENTRIES[: self.draw.randint(2, len(ENTRIES))]:
            for name in "uv"[: self.draw.randint(1, 2)]:
                rows = 2 * self.draw.choice((1, 1, 2, 4))
                self.parameters[f"{entry}.{name}"] = self.made.given(f"{entry}_{name}", rows, COLUMNS)
        self.given = self.made.given("x", COLUMNS)
        self.uses = self._uses()
        self.gathered_anew = self._some(0.5)
        """Entries that are gathered for each use; others once in each direction and microbatch."""
        self.kept = self._some(0.3)
        """Entries whose gathers backward reads."""
        self.graph_module = self._traced()

    @property
    def entry_of(self) -> dict[str, str]:
        return {fqn: fqn[0] for fqn in self.parameters}

    @property
    def inputs(self) -> list[Value]:
        shards = [Value("param", fqn, tuple(node.meta["val"].shape), torch.float32) for fqn, node in self.parameters.items()]
        return [*shards, Value("batch", "x", (COLUMNS,), torch.float32)]

    @property
    def outputs(self) -> list[Value]:
        shards = [Value("grad", value.fqn, value.shape, torch.float32) for value in self.inputs[:-1]]
        return [Value("loss", "", (COLUMNS,), torch.float32), *shards]

    def read(self, graph: fx.Graph) -> GraphAnalysis:
        return read_graph(graph, self.inputs, self.outputs)

    def _uses(self) -> list[str]:
        """Entries in order of use, each once and some again."""
        uses = list(dict.fromkeys(fqn[0] for fqn in self.parameters))
        if self.draw.random() < 0.5:
            self.draw.shuffle(uses)
        for _ in range(self.draw.choice((0, 0, 1, 2, 4))):
            uses.insert(self.draw.randrange(len(uses) + 1), self.draw.choice(uses))
        return uses

    def _some(self, share: float) -> set[str]:
        return {entry for entry in ENTRIES if self.draw.random() < share}

    def _traced(self) -> fx.GraphModule:
        losses = [self._microbatch() for _ in range(self.draw.choice((1, 1, 2, 3)))]
        self.made.backward = False
        loss = losses[0]
        for other in losses[1:]:
            loss = self.made.add(loss, other)
        self.made.backward = True
        return self.made.returns(loss, *(self.made.reduce(self.gradients[fqn], "avg") for fqn in self.parameters))

    def _microbatch(self) -> fx.Node:
        x, used, have = self.given, list[tuple[str, fx.Node]](), dict[str, fx.Node]()
        self.made.backward = False
        for entry in self.uses:
            have |= self._gathered([fqn for fqn in self.parameters if fqn[0] == entry], have)
            for fqn in (fqn for fqn in self.parameters if fqn[0] == entry):
                used.append((fqn, have[fqn]))
                x = self._product(x, have[fqn])
                x = self.made.neg(x) if self.draw.random() < 0.3 else x
        self.made.backward = True
        gradient, again = self.made.neg(x), dict[str, fx.Node]()
        for fqn, whole in reversed(used):
            again |= {fqn: whole} if fqn[0] in self.kept else self._gathered([fqn], again)
            own = self.made.call(aten.mul.Tensor, again[fqn], gradient)
            self.gradients[fqn] = self.made.add(self.gradients[fqn], own) if fqn in self.gradients else own
            gradient = self._product(gradient, again[fqn])
        return x

    def _gathered(self, fqns: list[str], have: dict[str, fx.Node]) -> dict[str, fx.Node]:
        self.made.module = fqns[0][0]
        return {fqn: self.made.gather(self.parameters[fqn]) for fqn in fqns if fqn[0] in self.gathered_anew or fqn not in have}

    def _product(self, x: fx.Node, whole: fx.Node) -> fx.Node:
        return self.made.call(aten.mul.Tensor, x, self.made.call(aten.sum.dim_IntList, whole, [0]))
