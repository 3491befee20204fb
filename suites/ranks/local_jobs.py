"""Jobs for ranks that share a process, and for ordinary ones to compare with."""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pytest_fxbucket.ranks import mark

C10D = torch.ops._c10d_functional
TURNS: list[int] = []


def wait(tensor):
    return C10D.wait_tensor(tensor)


def sums(rank, world, dtype):
    """Random addends, reduced in every form: the bits depend on the order of the additions."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(1001 * world, generator=generator, dtype=torch.float64).to(dtype)
    reduced = values.clone()
    dist.all_reduce(reduced, op=dist.ReduceOp.AVG)
    return reduced, wait(C10D.reduce_scatter_tensor(values, "sum", world, "0")), wait(C10D.all_reduce(values, "avg", "0"))


def functional_calls(rank, world, payload):
    out = torch.zeros(2)
    scattered = wait(C10D.reduce_scatter_tensor_out(torch.arange(2.0 * world) + rank, "sum", world, "0", out=out))
    own = [3, 1, 1, 1][rank]
    leaf = (torch.ones(2) * rank).requires_grad_()
    gathered = functional.all_gather_tensor_autograd(leaf, 0, dist.group.WORLD)
    (gathered * torch.arange(gathered.numel()) * (rank + 1)).sum().backward()
    return (
        scattered.tolist(),
        out.tolist(),
        wait(C10D.broadcast(torch.ones(2) * rank, 2, "0")).tolist(),
        wait(C10D.all_to_all_single(torch.arange(6.0) + 10 * rank, [own] * world, [3, 1, 1, 1], "0")).tolist(),
        gathered.tolist(),
        leaf.grad.tolist(),
    )


def dist_calls(rank, world, payload):
    results = []
    into = [torch.zeros(1) for _ in range(world)] if rank == 1 else None
    dist.gather(torch.tensor([float(rank)]), into, dst=1)
    results.append(into and [tensor.item() for tensor in into])
    own = torch.zeros(1)
    dist.scatter(own, [torch.tensor([10.0 + r]) for r in range(world)] if rank == 2 else None, src=2)
    results.append(own.item())
    objects = [{"rank": rank}]
    dist.broadcast_object_list(objects, src=3)
    picked = [None]
    dist.scatter_object_list(picked, list(range(world)) if rank == 0 else None, src=0)
    results.append((objects, picked))
    if rank % 2 == 0:
        dist.send(torch.tensor([5.0 + rank]), rank + 1)
    else:
        dist.recv(own, rank - 1)
    results.append(own.item())
    ring = [
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % world),
        dist.P2POp(dist.irecv, own, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    results.append(own.item())
    ones, twos = torch.ones(2), torch.ones(3) * 2
    with dist._coalescing_manager():
        dist.all_reduce(ones)
        dist.all_reduce(twos)
    results.append((ones.tolist(), twos.tolist()))
    half, _ = dist.new_subgroups(2)
    dist.all_reduce(ones, group=half)
    results.append((ones.tolist(), dist.get_process_group_ranks(half), half.group_desc))
    work = dist.all_reduce(ones, async_op=True)
    while not work.is_completed():
        pass
    work.wait()
    results.append(ones.tolist())
    return results


def store(rank, world, payload):
    store = dist.distributed_c10d._get_default_store()
    dist.distributed_c10d._store_based_barrier(rank, store, "here", world, timedelta(seconds=20))
    if rank == 3:
        store.set("word", "from 3")
    word = store.get("word")
    store.wait(["word"])
    first = store.compare_set("first", "", str(rank)).decode() == str(rank)
    return word, store.check(["word"]), store.add("count", 2) % 2, first


def meshes(rank, world, payload):
    mesh = dist.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    full = torch.randn(8, 8)
    tensor = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
    product = (tensor @ tensor).redistribute(mesh, [Replicate(), Replicate()]).to_local()
    return torch.allclose(product, full @ full), mesh.get_coordinate(), dist.get_process_group_ranks(mesh["b"].get_group())


def all_to_all_lists(rank, world, payload):
    outputs = [torch.zeros(r + 1) for r in range(world)]
    dist.all_to_all(outputs, [torch.full((rank + 1,), 10.0 * rank + r) for r in range(world)])
    return [output.tolist() for output in outputs]


def own_state(rank, world, payload):
    """What each rank sees after all have changed everything to something else."""
    fresh = torch.rand(1).item(), random.random(), os.environ.get("MINE"), torch.get_default_dtype()
    torch.manual_seed(rank)
    random.seed(rank)
    os.environ["MINE"] = str(rank)
    os.chdir(payload[rank % 2])
    sys.path.insert(0, f"/of/{rank}")
    torch.set_default_dtype([torch.float64, torch.float32][rank % 2])
    torch.set_grad_enabled(rank == 0)
    dist.barrier()
    seen = os.environ["MINE"], os.getcwd(), sys.path[0], torch.empty(1).dtype, torch.is_grad_enabled(), dist.get_rank()
    return fresh, seen, (torch.rand(1).item(), random.random())


def own_streams_and_filters(rank, world, payload):
    """What each rank prints into a text of its own, and whether it raises warnings."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), warnings.catch_warnings():
        warnings.simplefilter("error" if rank == 1 else "ignore")
        print("rank", rank)
        dist.barrier()
        raised = 0
        try:
            warnings.warn(f"of rank {rank}", stacklevel=1)
        except UserWarning:
            raised = 1
    print("behind", rank)
    return text.getvalue(), raised


def own_thread(rank, world, payload):
    """What torch keeps for each thread, as this rank finds it; it leaves something else."""
    found = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.empty(0).device.type
    torch.set_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    torch.set_default_device("meta")
    return found


def excepthooks(rank, world, payload):
    """How many hooks torch has hung before Python's own."""
    hook, count = sys.excepthook, 0
    while hook is not sys.__excepthook__:
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))
        hook, count = cells["old_hook"].cell_contents, count + 1
    return count


def turns(rank, world, payload):
    TURNS.append(rank)
    dist.barrier()
    TURNS.append(rank)
    dist.barrier()
    return list(TURNS[-2 * world :])


def add_one(rank, world, tensor):
    return tensor.add_(1).tolist()


def default_dtype(rank, world, payload):
    return torch.get_default_dtype()


def written_before_wait(rank, world, kind):
    """An input that is overwritten between launch and wait, and an output that is read there."""
    source = torch.ones(2 * world) * (rank + 1)
    if kind == "all_gather":
        result = C10D.all_gather_into_tensor(source, world, "0")
    elif kind == "reduce_scatter":
        result = C10D.reduce_scatter_tensor(source, "sum", world, "0")
    else:
        result = C10D.all_reduce_(source, "sum", "0")
    early = result.clone()
    source.zero_()
    return wait(result).tolist(), early.tolist()


def say(rank, world, payload):
    print(f"out of {rank}")
    print(f"err of {rank}", file=sys.stderr)
    dist.barrier()
    os.write(1, f"again {rank}\n".encode())
    if payload == rank:
        raise ValueError("said enough")


def circle(rank, world, payload):
    """Each of two ranks waits on the group that the other comes to later."""
    one, other = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    order = [one, other] if rank == 0 else [other, one]
    for group in order if rank < 2 else [other]:
        dist.all_reduce(torch.ones(3), group=group)


def leave_one_out(rank, world, culprit):
    dist.all_reduce(torch.ones(3))
    if rank != culprit:
        dist.all_reduce(torch.ones(5))


def stubborn(rank, world, culprit):
    try:
        leave_one_out(rank, world, culprit)
    except BaseException as error:
        raise ValueError("never mind") from error


def waits_for_a_key(rank, world, payload):
    if rank == 1:
        dist.distributed_c10d._get_default_store().get("nobody sets it")


def waits_for_a_busy_rank(rank, world, payload):
    if rank == 0:
        dist.distributed_c10d._get_default_store().get("nobody sets it")
    while rank == 1:
        pass


def another_kind(rank, world, culprit):
    dist.barrier()
    if rank == culprit:
        wait(C10D.all_gather_into_tensor(torch.ones(3), world, "0"))
    dist.all_reduce(torch.ones(5))


def another_size(rank, world, culprit):
    dist.all_reduce(torch.ones(6 if rank == culprit else 5))


def another_slice(rank, world, culprit):
    sizes = [1] * world
    wait(C10D.all_to_all_single(torch.ones(world), [2 if rank == culprit else 1, *sizes[1:]], sizes, "0"))


def never_waited(rank, world, culprit):
    if rank == culprit:
        dist.all_reduce(torch.ones(3), async_op=True)


def alone(rank, world, payload):
    """Without a collective: ends on the rank `payload`[0] as `payload`[1] says."""
    mark(f"mark of {rank}")
    fresh = torch.rand(1).item(), os.environ.get("MINE")
    torch.manual_seed(rank + 1)
    os.environ["MINE"] = "changed"
    if payload and payload[0] == rank and payload[1] == "raise":
        raise ValueError("no good")
    if payload and payload[0] == rank and payload[1] == "exit":
        os._exit(3)
    while payload and payload[0] == rank and payload[1] == "loop":
        pass
    return rank, world, dist.get_rank(), dist.get_world_size(), fresh


def another_root(rank, world, culprit):
    """One rank reduces to itself, the others to number 0."""
    dist.reduce(torch.ones(3), culprit if rank == culprit else 0)
