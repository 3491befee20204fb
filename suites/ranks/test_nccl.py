"""What ranks on GPUs set, what is recorded of collectives, and copies by way of the CPU; no GPU needed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.ranks import flight_recorder
from pytest_fxbucket.ranks.messages import PoolRequest
from pytest_fxbucket.ranks.process_groups import nccl, ordered
from pytest_fxbucket.ranks.worker import WorkerConfig
from suites.warm.runs import WarmRuns

PINNED = {
    "NCCL_ALGO": "Ring;allreduce:Tree",
    "NCCL_PROTO": "Simple",
    "NCCL_MIN_NCHANNELS": "1",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
APPLIED = """
import torch
from pytest_fxbucket.ranks.process_groups import nccl
torch.set_float32_matmul_precision("medium")
torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
nccl.apply("nccl")
print(*nccl.record("nccl"), sep="\\n")
print("starts CUDA:", torch.cuda.is_initialized())
"""


class TestSettings:
    def test_nccl_is_pinned_and_the_rank_sees_its_own_gpu(self) -> None:
        found = nccl.settings("nccl", "GPU-5d5b")
        assert found["CUDA_VISIBLE_DEVICES"] == "GPU-5d5b"
        assert PINNED.items() <= found.items()

    def test_ranks_that_share_a_gpu_say_so_and_leave_room_for_each_others_kernels(self) -> None:
        alone, shared = nccl.settings("nccl", "GPU-5d5b"), nccl.settings("nccl", "GPU-5d5b", 4)
        assert {name: value for name, value in shared.items() if alone.get(name) != value} == {
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_MIN_CTAS": "1",
            "NCCL_MAX_CTAS": "1",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        }
        assert nccl.settings("gloo:cuda", "GPU-5d5b", 4) == nccl.settings("gloo:cuda", "GPU-5d5b")

    def test_a_rank_has_its_part_of_a_gpu_on_which_other_runs_may_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        request = PoolRequest(2, 1, (0, 1), "nccl", gpus=("GPU-5d5b", "GPU-5d5b"), ranks_per_gpu=8)
        with socket.socket() as connection:
            config = WorkerConfig(request, 0, connection, -1, -1, -1)
        assert config.settings == nccl.settings("nccl", "GPU-5d5b", 8)
        assert config.settings["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "12"
        fractions: list[float] = []
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
        nccl.share_memory(config.sharers)
        assert fractions == [0.9 / 8]

    def test_gloo_with_tensors_on_gpus_pins_what_is_not_nccls(self) -> None:
        found = nccl.settings("gloo:cuda", "GPU-5d5b")
        assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not any("NCCL" in name for name in found)

    @pytest.mark.parametrize("backend", ["gloo", "local", "fake"])
    def test_off_gpus_nothing_is_set_or_recorded(self, backend: str) -> None:
        before = torch.get_deterministic_debug_mode()
        nccl.apply(backend)
        assert (nccl.settings(backend), nccl.record(backend)) == ({}, ())
        assert torch.get_deterministic_debug_mode() == before

    def test_flags_are_set_recorded_and_start_no_cuda(self, warm_runs: WarmRuns) -> None:
        done = warm_runs.run(["-c", APPLIED], Path.cwd(), os.environ)
        lines = done.stdout.splitlines()
        assert {
            "backend=nccl",
            "NCCL_ALGO=not set",  # what the environment really holds is recorded, not what it should
            "NCCL_MULTI_RANK_GPU_ENABLE=not set",
            "NCCL_MIN_CTAS=not set",
            "NCCL_MAX_CTAS=not set",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=not set",
            "deterministic_debug_mode=2",
            "cudnn.deterministic=True",
            "cudnn.benchmark=False",
            "cudnn.allow_tf32=False",
            "matmul.allow_tf32=False",
            "matmul.allow_bf16_reduced_precision_reduction=False",
            "matmul.allow_fp16_reduced_precision_reduction=False",
            f"torch={torch.__version__}",
            "starts CUDA: False",
        } <= set(lines)

    def test_of_nccl_the_library_that_is_loaded_is_recorded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))  # what torch was compiled with
        monkeypatch.setattr(nccl, "loaded_nccl", lambda: (2, 30, 7))
        assert "nccl=2.30.7" in nccl.record("nccl")

    @pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL: what is tested is one that has not")
    def test_a_torch_without_nccl_is_said_in_one_sentence(self) -> None:
        with pytest.raises(RuntimeError, match="back end nccl needs a torch that was built with CUDA and NCCL"):
            nccl.join(dist.HashStore(), 0, 1, nccl.timedelta(seconds=1))


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> Iterator[flight_recorder.FlightRecords]:
    """Rank 1's of 4, on a fake group, written by this process while the test runs."""
    records = flight_recorder.FlightRecords(4)
    monkeypatch.setattr(flight_recorder, "_all", ())
    monkeypatch.setattr(flight_recorder, "_own", None)
    flight_recorder.adopt(records.fd, 4)
    flight_recorder.act_as(1)
    with fake_world(1, 4):
        yield records
    records.close()


def said(book: flight_recorder.FlightRecords) -> list[str]:
    launches = book.read(1).launches
    members = book.read(1).groups
    return [f"{one.what} on {flight_recorder.ranks_text(members[one.group].members)}" for one in launches]


class TestEntered:
    def test_functional_collectives(self, book: flight_recorder.FlightRecords) -> None:
        ops, tensor = torch.ops._c10d_functional, torch.ones(8)
        with nccl.WatchedLaunches(1):
            ops.wait_tensor(ops.all_gather_into_tensor(tensor, 4, "0"))
            ops.wait_tensor(ops.reduce_scatter_tensor(tensor.bfloat16(), "avg", 4, "0"))
            for one in ops.all_gather_into_tensor_coalesced([tensor, tensor], 4, "0"):
                ops.wait_tensor(one)
            ops.wait_tensor(ops.all_reduce(tensor, reduce_op="sum", group_name="0"))
        assert said(book) == [
            "all_gather of 8 float32 on ranks 0-3",
            "reduce_scatter(avg) of 8 bfloat16 on ranks 0-3",
            "all_gather of 16 float32 on ranks 0-3",
            "all_reduce(sum) of 8 float32 on ranks 0-3",
        ]
        assert book.read(1).text == "launched all_reduce(sum) of 8 float32, number 4 on ranks 0-3"

    def test_those_of_torch_distributed_on_groups_of_their_own(self, book: flight_recorder.FlightRecords) -> None:
        tensor = torch.ones(4)
        pair = dist.new_group([1, 3])
        with nccl.WatchedLaunches(1):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=pair)
            dist.broadcast(tensor, 0)
            dist.reduce_scatter(torch.empty(1), list(tensor.split(1)))
            dist.all_gather([torch.empty(4) for _ in range(4)], tensor)
            dist.gather(tensor, None, 0)
            dist.all_to_all_single(torch.empty(4), tensor)
            dist.barrier()
            dist.send(tensor, 3)
            dist.reduce(tensor, 3, group=pair)
        assert said(book) == [
            "all_reduce(max) of 4 float32 on ranks 1, 3",
            "broadcast of 0 of 4 float32 on ranks 0-3",
            "reduce_scatter(sum) of 4 float32 on ranks 0-3",
            "all_gather of 4 float32 on ranks 0-3",
            "gather to 0 of 4 float32 on ranks 0-3",
            "all_to_all of 4 float32 on ranks 0-3",
            "barrier on ranks 0-3",
            "send to rank 3 of 4 float32 on rank 1",
            "reduce to 1(sum) of 4 float32 on ranks 1, 3",
        ]
        free = {one.kind for one in book.read(1).launches if not one.is_compared}
        assert free == {"all_gather", "gather to 0", "all_to_all"}  # of which members may lawfully give different sizes

    def test_messages_are_counted_as_sent_and_as_received(self, book: flight_recorder.FlightRecords) -> None:
        tensor = torch.ones(4)
        pair = dist.new_group([1, 3])
        with nccl.WatchedLaunches(1):
            dist.send(tensor, 3)
            dist.recv(tensor, 3, group=pair)
            ops = torch.ops._c10d_functional
            ops.isend(tensor, 3, 0, "0")
            ops.irecv(tensor, 3, 0, "0")
        assert [one.kind for one in book.read(1).launches] == ["send to rank 3", "receive from rank 3"] * 2
        where = book.read(1)
        flight_recorder.act_as(3)
        for _ in range(2):
            flight_recorder.message(1, 3, 0, "float32", 4, received=True)
            flight_recorder.message(3, 1, 0, "float32", 4, received=False)
        assert (book.read(3).received, book.read(3).sent) == (where.sent, where.received)
        assert where.sent != where.received

    def test_what_is_only_traced_is_no_launch(self, book: flight_recorder.FlightRecords) -> None:
        ops = torch.ops._c10d_functional
        with nccl.WatchedLaunches(1), FakeTensorMode():
            ops.wait_tensor(ops.all_reduce(torch.ones(4), "sum", "0"))
        assert said(book) == []

    def test_it_leaves_results_and_torch_compile_alone(self, book: flight_recorder.FlightRecords) -> None:
        seen: list[str] = []

        def look(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
            seen.extend(node.op for node in graph.graph.nodes)
            return graph

        compiled = torch.compile(lambda x: x.relu() + 1, backend=look)
        with nccl.WatchedLaunches(1):
            assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
        assert "call_method" in seen


class TestStaging:
    def test_tensors_on_the_cpu_stand_for_themselves(self) -> None:
        tensors = [torch.ones(2), [torch.ones(1)]]
        for ours in (ordered.on_cpu(tensors), ordered.room_for(tensors)):
            assert (ours[0] is tensors[0], ours[1][0] is tensors[1][0]) == (True, True)

    def test_others_go_there_and_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ordered, "is_staged", lambda tensor: tensor.dtype == torch.bfloat16)
        far, near = torch.ones(2, 3, dtype=torch.bfloat16).t(), torch.ones(2)
        ours = ordered.room_for([[far], near])
        assert (ours[0][0].shape, ours[0][0].dtype, ours[1] is near) == (far.shape, far.dtype, True)
        ours[0][0].fill_(7)
        assert torch.equal(far, torch.ones_like(far))
        ordered.bring_back([[far], near], ours)
        assert torch.equal(far, torch.full_like(far, 7))

    def test_a_tensor_on_another_device_is_staged(self) -> None:
        assert ordered.is_staged(torch.empty(1, device="meta"))
        assert ordered.room_for(torch.empty(3, 2, device="meta")).device.type == "cpu"
