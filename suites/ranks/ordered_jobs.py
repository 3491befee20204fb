"""Jobs that compare reductions bit for bit on real ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

C10D = torch.ops._c10d_functional
SIZES = (1, 3, 17, 257, 4099)


def addends(rank, world, dtype, scale=1):
    """One random tensor of each size, another on each rank, divisible by the world size."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(size * world * scale, generator=generator, dtype=torch.float64).to(dtype) for size in SIZES]


def in_rank_order(tensor, op):
    """The sum in rank order, from an all-gather."""
    world = dist.get_world_size()
    parts = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(parts, tensor)
    if op == "avg":
        parts = [part * torch.tensor(1 / world, dtype=part.dtype) for part in parts]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def chunk(tensor, rank, world):
    return tensor.view(world, -1)[rank]


def wait(tensor):
    return C10D.wait_tensor(tensor)


def separate_and_bucketed(rank, world, payload):
    """Whether reduce_scatter and all_reduce give one set of bits: separate, bucketed, coalesced, in place, at any offset."""
    dtype, op = payload
    inputs = addends(rank, world, dtype)
    whole = [in_rank_order(t, op) for t in inputs]
    expected = [chunk(t, rank, world) for t in whole]
    bucket = torch.cat([t.view(world, -1) for t in inputs], dim=1).flatten()
    sizes = [t.numel() // world for t in inputs]
    scattered = {
        "separate": [wait(C10D.reduce_scatter_tensor(t, op, world, "0")) for t in inputs],
        "bucketed": wait(C10D.reduce_scatter_tensor(bucket, op, world, "0")).split(sizes),
        "coalesced": [wait(t) for t in C10D.reduce_scatter_tensor_coalesced(inputs, op, world, "0")],
    }
    reduced = {
        "separate": [wait(C10D.all_reduce(t, op, "0")) for t in inputs],
        "bucketed": wait(C10D.all_reduce(torch.cat(inputs), op, "0")).split([t.numel() for t in inputs]),
        "coalesced": [wait(t) for t in C10D.all_reduce_coalesced(inputs, op, "0")],
        "in place": [wait(C10D.all_reduce_(t.clone(), op, "0")) for t in inputs],
    }
    return {
        **{f"reduce_scatter {name}": same(found, expected) for name, found in scattered.items()},
        **{f"all_reduce {name}": same(found, whole) for name, found in reduced.items()},
    }


def same(found, expected):
    return all(
        torch.equal(f.contiguous().view(torch.uint8), e.contiguous().view(torch.uint8))
        for f, e in zip(found, expected, strict=True)
    )


def gloos_own(rank, world, payload):
    """Whether gloo itself gives the same bits separate and bucketed (it does not)."""
    group = dist.new_group(backend="gloo")
    inputs = addends(rank, world, torch.float32)
    bucket = torch.cat(inputs)
    dist.all_reduce(bucket, group=group)
    for tensor in inputs:
        dist.all_reduce(tensor, group=group)
    return same(bucket.split([t.numel() for t in inputs]), inputs)


def gathers(rank, world, payload):
    mine = torch.full((3,), float(rank))
    out = torch.zeros(3 * world)
    into = wait(C10D.all_gather_into_tensor_out(mine, world, "0", out=out))
    coalesced = C10D.all_gather_into_tensor_coalesced([mine, mine + 1], world, "0")
    return (
        wait(C10D.all_gather_into_tensor(mine, world, "0")).tolist(),
        into.tolist(),
        out.tolist(),
        [wait(t).tolist() for t in coalesced],
    )


def async_in_opposite_orders(rank, world, payload):
    """Launches on two groups in opposite orders on odd ranks: legal, as long as nobody waits in between."""
    groups = [dist.group.WORLD, dist.new_group(list(range(world)))]
    ones = [torch.ones(5) * (1 + rank), torch.ones(7) * (1 + rank)]
    order = [0, 1] if rank % 2 else [1, 0]
    works = {i: dist.all_reduce(ones[i], group=groups[i], async_op=True) for i in order}
    futures = works[1].get_future().wait()
    works[0].wait()
    return ones[0][0].item(), ones[1][0].item(), futures[0] is ones[1] or futures[0].tolist() == ones[1].tolist()


def new_groups(rank, world, payload):
    """Sub-groups and meshes reduce in rank order as well."""
    mesh = dist.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    group = mesh["b"].get_group()
    tensor = addends(rank, world, torch.float32)[3]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    expected = sum(parts[1:], parts[0])
    whole = dist.init_device_mesh("cpu", (world,))
    found = wait(C10D.all_reduce(tensor, "sum", group.group_name))
    return type(group).__name__, whole.get_group().group_name, torch.equal(found, expected)


def other_operations(rank, world, payload):
    results = {}
    for name in ("MAX", "MIN", "PRODUCT", "SUM", "BOR"):
        tensor = torch.tensor([rank + 1, 2 * rank + 1])
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        results[name] = tensor.tolist()
    rooted = torch.tensor([float(rank)])
    dist.reduce(rooted, dst=1)
    results["reduce"] = rooted.item()
    outputs = torch.empty(rank + 1)
    dist.reduce_scatter(outputs, [torch.full((r + 1,), float(r)) for r in range(world)])
    results["uneven"] = outputs.tolist()
    bare = [torch.tensor([float(rank)]), torch.tensor([float(rank)])]
    dist.group.WORLD.allreduce(bare[0], op=dist.ReduceOp.MAX).wait()
    dist.group.WORLD.reduce(bare[1], root=2, op=dist.ReduceOp.MAX).wait()
    results["bare"] = [tensor.item() for tensor in bare]
    empty = torch.empty(0)
    dist.reduce_scatter_tensor(empty, torch.empty(0))
    dist.all_reduce(empty)
    dist.barrier()
    gathered = [None] * world
    dist.all_gather_object(gathered, {"rank": rank})
    results["objects"] = gathered
    own = torch.empty(2)
    dist.scatter(own, [torch.full((2,), float(r)) for r in range(world)] if rank == 1 else None, src=1)
    together = [torch.empty(2) for _ in range(world)] if rank == 2 else None
    dist.gather(own, together, dst=2)
    results["scattered"] = (own.tolist(), together and [one.tolist() for one in together])
    strided = torch.arange(6.0).view(2, 3).t()
    dist.all_reduce(strided)
    results["strided"] = strided.tolist()
    return results


def odd_tensors(rank, world, payload):
    """What a conjugated view adds up to, and what is said of slices of a tensor that lies otherwise than it reads."""
    rows = torch.arange(2.0 * world) + rank
    conjugated = torch.complex(rows, rows).conj()
    reduced = wait(C10D.reduce_scatter_tensor(conjugated, "sum", world, "0"))
    turned = torch.arange(2.0 * world).view(2, world).t()
    said = []
    for output, source in ((turned, turned.contiguous()), (turned.contiguous(), turned)):
        try:
            dist.all_to_all_single(output, source)
        except ValueError as error:
            said.append(str(error))
    return reduced.tolist(), said


def divided_by_a_factor(rank, world, payload):
    """Whether FSDP2's own factor multiplies each rank's gradient before the sum, with the bits of NCCL's operation for that."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(4, 4 * world, bias=False)
    sharded = torch.nn.Linear(4, 4 * world, bias=False)
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded).set_gradient_divide_factor(3.0)
    gradients = []
    for each in range(world):
        torch.manual_seed(1 + each)
        plain.weight.grad = None
        plain(torch.randn(2, 4)).square().sum().backward()
        gradients.append(plain.weight.grad * torch.tensor(1 / 3.0))
    torch.manual_seed(1 + rank)
    sharded(torch.randn(2, 4)).square().sum().backward()
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    return same([sharded.weight.grad.to_local()], [total.chunk(world)[rank]])


def bad_average(rank, world, payload):
    dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist.ReduceOp.AVG)


def uneven_tensor(rank, world, payload):
    C10D.reduce_scatter_tensor(torch.ones(world + 1), "sum", world, "0")


def fsdp_step(rank, world, precision):
    """Gradients of an MLP under torch's fully_shard, one layer a bucket against everything in one; bytes of each shard."""
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if precision else MixedPrecisionPolicy()
    )
    return [_one_step(rank, policy, layers_apart) for layers_apart in (True, False)]


def _one_step(rank, policy, layers_apart):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(36, 36) for _ in range(4)], torch.nn.Linear(36, 5))
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model if layers_apart else ():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    torch.manual_seed(1 + rank)
    loss = model(torch.randn(8, 36)).float().square().mean()
    loss.backward()
    grads = {name: p.grad.to_local() for name, p in model.named_parameters()}
    return loss.detach(), grads


def ddp_step(rank, world, payload):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4) * (rank + 1)).square().mean().backward()
    return model.module.weight.grad.tolist()


def every_collective_many_times(rank, world, rounds):
    """Launches while gloo's thread lets go of the last launch's tensors, which needs the interpreter lock by then."""
    for _ in range(rounds):
        dist.all_gather([torch.empty(5) for _ in range(world)], torch.ones(5))
        dist.broadcast(torch.ones(5), 1)
        dist.all_reduce(torch.ones(5))
        dist.all_to_all_single(torch.empty(world), torch.ones(world))
        wait(C10D.all_gather_into_tensor(torch.ones(3), world, "0"))
        dist.scatter(torch.empty(5), [torch.ones(5) for _ in range(world)] if rank == 1 else None, src=1)
        dist.gather(torch.ones(5), [torch.empty(5) for _ in range(world)] if rank == 2 else None, dst=2)
        dist.barrier()
        if rank < 2:
            (dist.isend(torch.ones(2), 1) if rank == 0 else dist.irecv(torch.empty(2), 0)).wait()
    return "through"
