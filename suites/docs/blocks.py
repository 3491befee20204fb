"""Code blocks of README and of every page below docs/, and how each is tried.

- ``python``: a block whose first line is ``# folder/file.py`` is that file; one with a test in it runs under pytest; all others
  of a page run one after the other in one process.
- ``toml``: a plan, or a part of one that is merged over a small plan. It must load; where it names a module that a page writes,
  its items run, too. A block whose first line is ``# file.toml`` is that file.
- ``ini``: every option is one of ours.
- ``bash``: a command a line, which the real argument parser of the command must take.
- ``console``: commands behind ``$``, each with what it prints; they are run. ``...`` stands for lines that are left out.
- ``text``: a golden, or what the Python block above it prints; ``...`` as in ``console``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")))
LANGUAGES = {"python", "toml", "ini", "bash", "console", "text"}

_FENCE = re.compile(r"^( *)(`{3,}|~{3,})([^\n]*)\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w./-]+\.(?:py|toml))\n")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    """Path from the root of the repository."""
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        """As people look it up."""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that it is, if its first line says so."""
        found = _FILE.match(self.text)
        return found[1] if found else None

    @property
    def is_test(self) -> bool:
        """Whether pytest is to run it."""
        return self.language == "python" and re.search(r"^def test_", self.text, re.MULTILINE) is not None

    @property
    def first(self) -> str:
        """Its first line."""
        return self.text.partition("\n")[0]


@dataclass(frozen=True, slots=True)
class NotRun:
    """A block that is not tried, and why."""

    page: str
    first: str
    """How its first line begins."""
    reason: str

    def names(self, block: Block) -> bool:
        """Whether ``block`` is meant."""
        return block.page == self.page and block.first.startswith(self.first)


NOT_RUN = (
    NotRun(
        "docs/reference/cli.md",
        "$ fxbucket parity fixtures/plans/trainer.toml --steps 40",
        "it takes a minute and prints memory; the suite of the command runs it, and the bash block above it is parsed",
    ),
    NotRun(
        "docs/howto/benchmark.md",
        "import pytest",
        "it asserts a step time, which is for other machines than the one that happens to run this",
    ),
    NotRun(
        "docs/howto/torch-compile.md",
        "step           aot_eager",
        "it needs a compiler and a minute; the suite of compiled steps runs a smaller shape",
    ),
    NotRun(
        "docs/explanation/same.md",
        "the loss: first differs at clamp (aten.clamp.default)",
        "it is of a pass that is wrong on purpose; the suite of the check holds such sentences",
    ),
)
"""All blocks that are not tried. A new one needs a reason that a reader takes."""


def blocks_in(page: str, text: str) -> list[Block]:
    """Give the fenced blocks of a page; directives such as ``{toctree}`` are Sphinx's own."""
    found = []
    for fence in _FENCE.finditer(text):
        language = fence[3].strip()
        if not language.startswith("{"):
            found.append(Block(page, text.count("\n", 0, fence.start()) + 1, language, fence[4]))
    return found


def is_tried(block: Block) -> bool:
    """Whether nothing in the list speaks against it."""
    return not any(one.names(block) for one in NOT_RUN)


BLOCKS = tuple(block for page in PAGES for block in blocks_in(page, (ROOT / page).read_text(encoding="utf-8")))
TRIED = tuple(filter(is_tried, BLOCKS))


def of(language: str) -> list[Block]:
    """Blocks of a language that are to be tried."""
    return [block for block in TRIED if block.language == language]


def missing(printed: str, shown: str) -> str:
    """The first piece of ``shown``, parted at ``...``, that is not in ``printed`` behind the one before; empty: all are."""
    place = 0
    pieces = (piece.strip("\n") for piece in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE))
    for text in filter(None, pieces):
        found = re.search(rf"^{re.escape(text)}$", printed[place:], re.MULTILINE)
        if found is None:
            return text
        place += found.end()
    return ""


def commands(block: Block) -> list[tuple[str, str]]:
    """Each command of a ``console`` block and what is shown below it; of a ``bash`` block every line."""
    if block.language == "bash":
        lines = [line.partition("  #")[0].strip() for line in block.text.splitlines()]
        return [(line, "") for line in lines if line and not line.startswith("#")]
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    return [(command.strip(), shown) for command, _, shown in (part.partition("\n") for part in parts[1:])]


def languages_of(blocks: Iterable[Block]) -> set[str]:
    """Languages that occur."""
    return {block.language for block in blocks}
