"""Two nodes of torchrun on this machine: two agents with two pytest processes each, or processes that no agent looks after."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch.distributed as dist

from suites.pytest_plugin.processes import ends, started_with
from suites.warm.runs import WarmRun, WarmRuns

LIMIT_S = 240


@dataclass(frozen=True)
class Done:
    """What two nodes left: exit statuses, all output, and processes that did not end with them."""

    statuses: list[int]
    output: str
    left: list[int]


def run(runs: WarmRuns, folder: Path, *args: str, **environ: str) -> Done:
    """Run `pytest args` in `folder` on 2 nodes with 2 new processes each; a node that hangs is killed after LIMIT_S seconds."""
    token = f"FXBUCKET_SUITE={uuid.uuid4()}"

    def start(node: int, port: int, output: IO[bytes]) -> list[WarmRun]:
        words = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-conf=is_host=0", "--rdzv-id=suite"]
        words += ["--local-addr=127.0.0.1", f"--rdzv-endpoint=127.0.0.1:{port}", "-m", "pytest", *args]
        given = {**_outer(), **environ, "FXBUCKET_SUITE": token.partition("=")[2]}
        return [runs.start(["-m", "torch.distributed.run", *words], folder, given, output, output)]

    return _both(folder, start, lambda: [*runs.left(), *(pid for pid in started_with(token) if not ends(pid))])


def run_alone(runs: WarmRuns, folder: Path, *args: str, each: int = 1, **environ: str) -> Done:
    """The same with `each` processes on each node, which are told their places as agents tell them, and nobody's children."""

    def start(node: int, port: int, output: IO[bytes]) -> list[WarmRun]:
        world = {"WORLD_SIZE": f"{2 * each}", "LOCAL_WORLD_SIZE": f"{each}", "GROUP_WORLD_SIZE": "2", "GROUP_RANK": f"{node}"}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        given = {**_outer(), **environ, **world, **meeting, "TORCHELASTIC_RUN_ID": "suite"}
        places = ({"RANK": f"{each * node + local}", "LOCAL_RANK": f"{local}"} for local in range(each))
        return [runs.start(["-m", "pytest", *args], folder, given | place, output, output) for place in places]

    return _both(folder, start, runs.left)


def _outer() -> dict[str, str]:
    mine = ("PYTEST_XDIST", "PYTEST_CURRENT_TEST", "COV_")
    return {name: value for name, value in os.environ.items() if not name.startswith(mine)} | {"OMP_NUM_THREADS": "1"}


def _both(folder: Path, start: Callable[[int, int, IO[bytes]], Sequence[WarmRun]], left: Callable[[], list[int]]) -> Done:
    """Start the processes of each node, which are told the store's port, and wait until all have ended."""
    # The nodes' meeting point: the port is taken before its number is known, so nobody else can have it.
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    outputs = [folder / f"node{node}.output" for node in range(2)]
    started: list[WarmRun] = []
    for number, path in enumerate(outputs):
        with path.open("ab") as file:
            started += start(number, port, file)
    try:
        statuses = [process.wait(LIMIT_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
        del store
    return Done(statuses, "\n".join(path.read_text(errors="replace") for path in outputs), left())
