"""``fxbucket goldens BASE [FOLDER]``: what changed in goldens since a commit, as Markdown for a comment on a change."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from pytest_fxbucket.commit import Commit, Repository
from pytest_fxbucket.errors import GoldenError, UsageError
from pytest_fxbucket.golden.store import HEADER, parse
from pytest_fxbucket.words import counted

_LONGEST = 60_000
"""Characters; a comment on GitHub takes 65,536."""
_UNREADABLE = f"{HEADER}that cannot be read: "
"""Begins what stands for the text of such a golden."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``fxbucket goldens``."""
    parser.add_argument("base", metavar="BASE", help="the commit to compare with")
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", type=Path, default=Path("golden"), help="where goldens are (golden)"
    )


def run(options: Namespace) -> int:
    """Print the comment."""
    print(comment(options.base, options.folder))
    return 0


def comment(base: str, folder: Path) -> str:
    """What changed below ``folder`` from the commit ``base`` to the files that are there now.

    Raises FxbucketError, UsageError for a ``base`` that is no commit here or a folder that has no golden, then or now.
    """
    # Repository.of looks in the folders above a file, which need not be there: any name in the folder will do.
    repository = Repository.of(folder / "*.txt", "BASE")
    # So the folder itself may be a link, too.
    old = _then(repository, repository.commit(base), repository.path_of(folder / "*.txt").parent)
    new = _now(repository, folder, old)
    if not old and not new:
        raise UsageError(f"{folder} has no golden, neither now nor at {base}; say where goldens are")
    changed = [path for path in sorted(old | new) if old.get(path) != new.get(path)]
    if not changed:
        return "Goldens are as before."
    parts = [f"{counted(len(changed), 'golden')} of {len(old | new)} changed."]
    for place, path in enumerate(changed):
        part = "\n".join(_part(path, old.get(path), new.get(path)))
        if sum(map(len, parts)) + len(part) > _LONGEST:
            parts.append(f"And {counted(len(changed) - place, 'more golden')}.")
            break
        parts.append(part)
    return "\n\n".join(parts)


def _then(repository: Repository, commit: Commit, folder: PurePosixPath) -> dict[str, str]:
    """Goldens at ``commit``, by path from the top."""
    left_out = repository.left_out(f"{folder}/")
    lines = repository.git("ls-tree", "-r", "-z", commit.sha, "--", f"{folder}/").split("\0")
    texts: dict[str, str] = {}
    for line in filter(None, lines):
        about, _, name = line.partition("\t")
        if name.endswith(".txt") and name not in left_out:
            # By its number, not by its name, which need not be text.
            texts[name] = repository.git("cat-file", "blob", about.split()[2])
    # The folder may have other text files, too.
    return {name: text for name, text in texts.items() if text.startswith(HEADER)}


def _now(repository: Repository, folder: Path, known: Collection[str]) -> dict[str, str]:
    """Goldens that are there, by path from the top, and what stands in the place of ``known`` ones.

    One that cannot be read is :data:`_UNREADABLE` and why.
    """
    texts: dict[Path, str] = {}
    for path in folder.rglob("*.txt"):
        if path.is_file():  # no folder, and no link that leads nowhere
            try:
                texts[path] = path.read_text(encoding="utf-8", errors="replace")
            except OSError as error:
                texts[path] = f"{_UNREADABLE}{error.strerror}"
    # As git's own output is read.
    found = {os.fsencode(repository.path_of(path)).decode("utf-8", "replace"): text for path, text in texts.items()}
    return {name: text for name, text in found.items() if text.startswith(HEADER) or name in known}


def _part(path: str, old: str | None, new: str | None) -> Iterator[str]:
    """The heading of one golden, and what changed in it: in words, and as a diff."""
    if new is not None and new.startswith(_UNREADABLE):
        yield f"**{path}** cannot be read: {new.removeprefix(_UNREADABLE)}"
        return
    if old is None or new is None:
        yield f"**{path}** is {'new' if old is None else 'gone'}"
        return
    from pytest_fxbucket.golden.mismatch import change_lines

    yield f"**{path}**"
    try:
        lines = change_lines(parse(old, "the old one"), parse(new, "the new one"), ("before", "now"))
    except GoldenError as error:
        yield f"\ncannot be compared: {error}"
        return
    # Words come first, below a heading that is not wanted here; an empty line parts them from the diff.
    diff = lines.index("")
    yield "".join(f"\n- {word.strip()}" for word in lines[1:diff])
    yield from ("\n```diff", *lines[diff + 1 :], "```")
