"""Two of torchrun's agents on this machine, each with two pytest processes, which meet on a loopback port that was free."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from suites.plugin.processes import ends

LIMIT_S = 240


@dataclass(frozen=True)
class Done:
    """What two agents left: exit statuses, all output, and processes that did not end with them."""

    statuses: list[int]
    output: str
    left: list[int]


def run(folder: Path, *args: str, **environ: str) -> Done:
    """Run `pytest args` in `folder` on 2 nodes with 2 processes each; a node that hangs is killed after LIMIT_S seconds."""
    token = f"FXBUCKET_SUITE={uuid.uuid4()}"
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    env = {**outer, **environ, "OMP_NUM_THREADS": "1", "FXBUCKET_SUITE": token.partition("=")[2]}
    # The agents' own meeting point: the port is taken before its number is known, so nobody else can have it.
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=is_host=0", "--rdzv-id=suite", "--local-addr=127.0.0.1"]
    outputs = [folder / f"node{node}.output" for node in range(2)]
    agents = []
    for path in outputs:
        with path.open("wb") as file:
            agents.append(
                subprocess.Popen([*command, "-m", "pytest", *args], cwd=folder, env=env, stdout=file, stderr=subprocess.STDOUT)
            )
    try:
        statuses = [agent.wait(LIMIT_S) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
        del store
    left = [pid for pid in _with(token) if not ends(pid)]
    return Done(statuses, "\n".join(path.read_text(errors="replace") for path in outputs), left)


def _with(setting: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if setting.encode() in environment.split(b"\0"):
                found.append(int(entry.name))
    return found
