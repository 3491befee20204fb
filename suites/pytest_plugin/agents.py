"""Two nodes of torchrun on this machine: two agents with two pytest processes each, or one each that no agent looks after."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from suites.pytest_plugin.processes import ends, started_with

LIMIT_S = 240


@dataclass(frozen=True)
class Done:
    """What two nodes left: exit statuses, all output, and processes that did not end with them."""

    statuses: list[int]
    output: str
    left: list[int]


def run(folder: Path, *args: str, **environ: str) -> Done:
    """Run `pytest args` in `folder` on 2 nodes with 2 processes each; a node that hangs is killed after LIMIT_S seconds."""
    module = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-conf=is_host=0"]
    module += ["--rdzv-id=suite", "--local-addr=127.0.0.1", "--rdzv-endpoint=127.0.0.1:{port}", "-m", "pytest", *args]
    return _both(folder, module, lambda node, port: environ)


def run_alone(folder: Path, *args: str, **environ: str) -> Done:
    """The same with 1 process on each node, which is told its place as agents tell it: a quarter of the processes."""

    def place(node: int, port: int) -> dict[str, str]:
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        rank = {"RANK": str(node), "GROUP_RANK": str(node), "TORCHELASTIC_RUN_ID": "suite"}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return environ | world | rank | meeting

    return _both(folder, ["pytest", *args], place)


def _both(folder: Path, module: Sequence[str], environ: Callable[[int, int], Mapping[str, str]]) -> Done:
    """Run `python -m module` for each node, with the store's port in its words, until both have ended."""
    token = f"FXBUCKET_SUITE={uuid.uuid4()}"
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    outer |= {"OMP_NUM_THREADS": "1", "FXBUCKET_SUITE": token.partition("=")[2]}
    # The nodes' meeting point: the port is taken before its number is known, so nobody else can have it.
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    command = [sys.executable, "-m", *(word.replace("{port}", str(port)) for word in module)]
    outputs = [folder / f"node{node}.output" for node in range(2)]
    nodes = []
    for number, path in enumerate(outputs):
        env = {**outer, **environ(number, port)}
        with path.open("wb") as file:
            nodes.append(subprocess.Popen(command, cwd=folder, env=env, stdout=file, stderr=subprocess.STDOUT))
    try:
        statuses = [node.wait(LIMIT_S) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
        del store
    left = [pid for pid in started_with(token) if not ends(pid)]
    return Done(statuses, "\n".join(path.read_text(errors="replace") for path in outputs), left)
