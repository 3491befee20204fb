"""Ranks on GPUs: an environment and torch flags under which the same step gives the same bits again, and a group over NCCL.

By default NCCL chooses algorithm, protocol and channels by message size, so a bucketed sum adds in another order than separate
ones. A ring on one channel adds each rank's share in one order, wherever an element lies.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from pytest_fxbucket.backends import BACKENDS
from pytest_fxbucket.compat import c10d

_REPEATABLE = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVIDIA_TF32_OVERRIDE": "0",
}
_ONE_RING = {
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MIN_NCHANNELS": "1",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
}
# One machine: no socket but on loopback, none at all for NCCL's own status service; and no second clock beside the parent's.
_AT_HOME = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_RAS_ENABLE": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def settings(backend: str, gpu: str = "") -> dict[str, str]:
    """The environment of a rank, whose only GPU is ``gpu`` (a UUID): to be set before CUDA starts, and kept. Empty off GPUs."""
    if not BACKENDS[backend].gpus:
        return {}
    ours = {"CUDA_VISIBLE_DEVICES": gpu, **_REPEATABLE}
    return {**ours, **_ONE_RING, **_AT_HOME} if backend == "nccl" else ours


def apply(backend: str) -> None:
    """Set torch's flags for a job: deterministic or an error, no TF32, no sums in less than float32. None off GPUs."""
    if not BACKENDS[backend].gpus:
        return
    torch.set_deterministic_debug_mode("error")  # as use_deterministic_algorithms(True), which imports inductor
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def record(backend: str) -> tuple[str, ...]:
    """What ``settings`` and ``apply`` set, as it is now in this process, and versions behind it: a line ``name=value`` each."""
    if not BACKENDS[backend].gpus:
        return ()
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    flags = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "deterministic_debug_mode": torch.get_deterministic_debug_mode(),
        "cudnn.deterministic": cudnn.deterministic,
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.allow_tf32": cudnn.allow_tf32,
        "matmul.allow_tf32": matmul.allow_tf32,
        "matmul.allow_bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "matmul.allow_fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        flags["gpu"] = torch.cuda.get_device_name()
    if backend == "nccl" and dist.is_nccl_available():
        flags["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    environ = {name: os.environ.get(name, "not set") for name in settings(backend)}
    return tuple(f"{name}={value}" for name, value in {"backend": backend, **environ, **flags}.items())


def join(store: c10d.Store, rank: int, world: int, timeout: timedelta) -> None:
    """Make the default process group over NCCL, at once and not at the first collective, on the rank's one GPU.

    Raises RuntimeError for a torch that cannot.
    """
    if torch.version.cuda is None or not dist.is_nccl_available():
        raise RuntimeError("back end nccl needs a torch that was built with CUDA and NCCL")
    c10d.leave_groups_unwrapped()  # they are timed, too
    gpu = torch.device("cuda", 0)
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=timeout, device_id=gpu)
