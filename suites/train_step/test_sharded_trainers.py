"""Trainers under FSDP2, DDP and tensor parallelism, captured as they are: every bit of eager's, on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.errors import RankError
from pytest_fxbucket.ranks.pools import Pools
from suites.train_step.refused_trainers import REFUSED
from suites.train_step.sharded_trainers import FOUR, TOLD, WAYS

ROOT, SUITE = Path(__file__).resolve().parents[2], "suites.train_step"
LAUNCHES = {
    "rows that ranks do not divide, bucketed": (8, 6, 1),
    "two microbatches, bucketed": (16, 10, 1),
    "three views of a batch": (66, 28, 0),
    "DDP, a head for each microbatch": (0, 0, 28),
    "two microbatches, the last reduces": (44, 14, 1),
}
"""All-gathers, reduce-scatters and all-reduces in the graph."""


def run(pools: Pools, job: str, payload: Any = None, world: int = 2, of: str = "sharded_trainers") -> Any:
    """What each rank gives, which is the same on all."""
    found = pools.get(world).run(f"{SUITE}.{of}:{job}", [payload] * world, timeout_s=120, paths=[str(ROOT)])
    assert found == [found[0]] * world
    return found[0]


@pytest.mark.parametrize("name", WAYS)
def test_a_trainer_that_is_parted_already_trains_as_eager(pools: Pools, name: str) -> None:
    found = run(pools, "train", {"name": name}, 4 if name in FOUR else 2)
    if name in LAUNCHES:
        assert tuple(found.values()) == LAUNCHES[name]


@pytest.mark.parametrize("name", TOLD)
def test_what_a_model_is_told_between_two_calls_is_traced_anew(pools: Pools, name: str) -> None:
    assert run(pools, "told", name) == 1 + len(TOLD[name][1])


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_that_use_modules_in_other_orders_are_refused(pools: Pools, parallel: str) -> None:
    """Their launches would meet, one head's with the other's."""
    assert run(pools, "in_another_order", "alike", of="refused_trainers") is None
    with pytest.raises(
        RankError, match=r"ranks launch different collectives: number \d+ is .* of (module\.)?heads\.\d .* on rank"
    ):
        run(pools, "in_another_order", parallel, of="refused_trainers")


def test_a_trainers_work_goes_into_its_next_step(pools: Pools) -> None:
    assert run(pools, "across") == []


def test_a_distributed_checkpoint_of_a_captured_trainer_goes_on_in_eager(pools: Pools, tmp_path: Path) -> None:
    assert run(pools, "saved", str(tmp_path)) == []


def test_a_module_of_a_trainer_that_is_overridden_is_called(pools: Pools) -> None:
    (called,) = run(pools, "overridden")
    assert "call" in called


def test_what_no_graph_takes_over_is_named(pools: Pools) -> None:
    says = run(pools, "refusals", of="refused_trainers")
    assert says.keys() == REFUSED.keys()
    assert says["columns"].endswith("sharded by fully_shard on dimension 1; a captured step takes dimension 0")
    assert "DDP, which sends the buffers of rank 0 to all before each forward" in says["buffers"]
    assert says["hook"] == "the model is under DDP with a comm hook, which a captured step does not take over; leave it out"
    assert "it calls torch.distributed.all_gather, which works in place and behind autograd's back" in says["gathered in place"]
    assert says["collective of its own"].endswith(
        "is under fully_shard with set_custom_reduce_scatter, which a captured step does not take over; leave it out"
    )
    assert "it calls torch.distributed.broadcast, which works in place and behind" in says["sent by the optimizer"]
    assert " waits, not reduced, for a backward of several forwards, in which FSDP2 " in says["two forwards behind one"]
    assert "the gradient of 3.bias is not reduced when the step ends" in says["never reduced"]
    assert "the step leaves the model told otherwise than before it (set_requires_gradient_sync" in says["left told"]
    assert "the optimizer Normed looks at more than one element at a time" in says["norms"]
    not_taken = ", which a captured step does not take over; "
    assert says["delayed"] == f"the model is under DDP with delay_all_reduce_named_params{not_taken}leave it out"
    assert says["composable"] == f"the model is under replicate(){not_taken}put it under DDP"
    assert says["vmapped"].endswith(
        "parameters cannot be gathered under torch.func or vmap; call modules under fully_shard outside of them"
    )
    assert says["anomalies"].endswith(
        "set_detect_anomaly looks at the values of gradients, which are known only when it runs; leave it out"
    )
