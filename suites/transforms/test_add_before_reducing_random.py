"""Random sums of reductions, some of them read or written elsewhere too: on numbers whose sums are exact no bit changes."""

from __future__ import annotations

import random

from torch import fx

from pytest_fxbucket.transforms.add_before_reducing import add_before_reducing
from suites.passes.programs import Program, aten
from suites.transforms.duplicates import Changed, changed

COUNT = 80


def drawn(number: int) -> Changed:
    """A graph of the seed ``number`` for 2 ranks: halves of integers are exact."""
    draw, made = random.Random(number), Program(2)
    inputs, there, returned = made.fulls("abcdef"), list[fx.Node](), list[fx.Node]()
    for _ in range(draw.randint(6, 24)):
        what = draw.choice(("reduce", "reduce", "reduce", "add", "add", "add", "view", "write", "write result", "give"))
        if what == "reduce":
            there.append(made.reduce(draw.choice(inputs), draw.choice(("sum", "sum", "sum", "avg"))))
        elif what == "write":
            made.call(aten._foreach_add_.Scalar, [draw.choice(inputs)], 1)
        elif what == "add" and len(there) > 1:
            one, other = draw.sample(there, 2)
            there = [node for node in there if node not in (one, other) or draw.random() < 0.1]
            there.append(made.add(one, other))
        elif what == "view" and there:
            at = draw.randrange(len(there))
            flat = made.call(aten.view.default, there[at], [-1])
            there[at] = made.call(aten.view.default, flat, [2, 3])
        elif what == "write result" and there and draw.random() < 0.3:
            made.call(aten.add_.Tensor, draw.choice(there), 1)
        elif what == "give" and there:
            returned.append(made.neg(draw.choice(there)))
    return changed(made, *returned, *map(made.neg, there), *map(made.neg, inputs), by=add_before_reducing, seed=number)


def test_random_sums_give_the_same_bits() -> None:
    found = [drawn(number) for number in range(COUNT)]
    assert sum(len(one.told.done) for one in found) > COUNT // 4
    assert len({why.split()[-1] for one in found for why in one.whys}) > 4
