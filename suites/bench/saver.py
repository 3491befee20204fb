"""A process that saves runs: ``saver.py FOLDER NAME COUNT [STOP_AT]``. It says ``ready``, and goes on when its input says so.

With STOP_AT, such as fsync-before, it says ``there`` when it comes to that function of os, and waits to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from pytest_fxbucket.pytest_plugin.saving import save_new


def stop_at(name: str, when: str) -> None:
    real = getattr(os, name)

    def stopping(*args: object, **kwargs: object) -> object:
        result = real(*args, **kwargs) if when == "after" else None
        print("there", flush=True)
        signal.pause()
        return result

    setattr(os, name, stopping)


def main(folder: str, name: str, count: str, at: str = "") -> None:
    if at:
        stop_at(*at.split("-"))
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(int(count)):
        save_new(Path(folder), name, json.dumps({"of": name, "number": number, "data": [number] * 20_000}))


if __name__ == "__main__":
    main(*sys.argv[1:])
