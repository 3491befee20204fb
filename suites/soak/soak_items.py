"""Items in a row on one pool, of all kinds that there are; collected only by name, as many as --soak-items says."""

from __future__ import annotations

import pytest
import torch

JOBS = "suites.soak.soak_jobs:"
WORLD = 4


def pytest_generate_tests(metafunc):
    count = metafunc.config.getoption("soak_items")
    kinds = [KINDS[number % len(KINDS)] for number in range(count)]
    metafunc.parametrize(("number", "kind"), list(enumerate(kinds)), ids=[f"{n}-{kind}" for n, kind in enumerate(kinds)])


def payload_of(kind, number):
    return torch.full((1 << 16,), float(number)) if kind == "bounce" else number


KINDS = ("nothing", "reduce", "bounce", "print_much", "make_groups", "train")


def test_item(fxbucket_ranks, number, kind):
    results = fxbucket_ranks(WORLD).run(JOBS + kind, [payload_of(kind, number)] * WORLD, timeout_s=120)
    assert len(results) == WORLD
    if kind == "bounce":
        assert [result[0].item() for result in results] == [number + rank for rank in range(WORLD)]


@pytest.mark.fxbucket_ranks(WORLD)
def test_body(number, kind):
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == WORLD
