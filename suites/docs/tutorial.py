"""The tutorial, followed from an empty folder: its files are written and its commands run in the order of the page."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from suites.docs.blocks import commands, missing, of

PAGE = "docs/tutorial.md"


def follow(folder: Path, run: Callable[[str, list[str]], str]) -> None:
    """Write files below ``folder`` and ``run`` each command, which says what it printed; fails unless it is what is shown."""
    blocks = [block for language in ("python", "toml", "console") for block in of(language) if block.page == PAGE]
    for block in sorted(blocks, key=lambda block: block.line):
        if block.file:
            path = folder / block.file
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            continue
        for command, shown in commands(block):
            program, *words = shlex.split(command)
            said = run(program, words)
            assert missing(said, shown) == "", f"{block.where}: {command}\n{said}"
    assert (folder / "golden" / "net.txt").is_file()
