"""A process that leases GPUs: `python lease_holder.py FOLDER COUNT PLACES GPU...` says what it does, a line each, on stdout.

It gives its lease back when a line comes on stdin, and ends when stdin does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pytest_fxbucket.ranks.machine import take


def main(folder: str, count: str, places: str, *gpus: str) -> None:
    def say(text: str) -> None:
        print(text, flush=True)

    lease = take(int(count), gpus, places=int(places), limit_s=60, say=say, folder=Path(folder))
    say(f"has {' '.join(lease.gpus)}")
    if sys.stdin.readline():
        lease.release()
        say("gave back")
        sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
