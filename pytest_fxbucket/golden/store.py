"""Golden files: a text for each plan, between a line that says its format and one that says it is whole."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_fxbucket.errors import GoldenError
from pytest_fxbucket.files import digest, in_the_way

FORMAT = 2
HEADER = "# fxbucket golden "
FOOTER = "# end "
_LONGEST_NAME = 255
CONFLICT = re.compile(r"^(<{7} |={7}$|>{7} |\|{7} )", re.MULTILINE)


def render(body: str) -> str:
    """Return the whole text of a golden file for ``body``: header, body, and a footer with the body's digest."""
    body = body if body.endswith("\n") else body + "\n"
    return f"{HEADER}{FORMAT}\n{body}{FOOTER}{_digest(body)}\n"


def parse(text: str, where: str) -> str:
    """Return the body of a golden file's whole ``text``.

    Raises GoldenError, one sentence that begins with ``where``: conflict markers, another format, cut short, or edited.
    """
    body, footer = _split_footer(text.partition("\n")[2])
    # A text may have such lines of its own. Of all faults this is the first, since a marker may stand in the place of any line.
    if CONFLICT.search(text) and footer != _digest(body):
        raise GoldenError(f"{where} has merge conflict markers; settle the merge and accept it again")
    _check_format(text.partition("\n")[0], where)
    if footer is None and (behind := _behind_footer(body)):
        raise GoldenError(f"{where} has text behind its last line, {behind!r}; remove that, or accept it again")
    if footer is None:
        raise GoldenError(f"{where} is cut short: its last line is not '{FOOTER}<digest>'; restore it or accept it again")
    if footer != _digest(body):
        raise GoldenError(
            f"{where} is not what was accepted: its text does not give the digest in its last line (edited by hand, or "
            "merged); restore it or accept it again"
        )
    return body


def _digest(body: str) -> str:
    return digest(body.encode())[:16]


def _check_format(first: str, where: str) -> None:
    number = first.removeprefix(HEADER)
    if not first.startswith(HEADER) or not re.fullmatch(r"[0-9]{1,9}", number):
        raise GoldenError(f"{where} is not a golden: its first line is not '{HEADER}{FORMAT}'; accept it again")
    if int(number) > FORMAT:
        raise _newer(int(number), where)
    if int(number) < FORMAT:
        raise GoldenError(f"{where} has format {number}, which this version no longer reads; accept it again")


def _newer(number: int, where: str) -> GoldenError:
    return GoldenError(
        f"{where} was written by a newer pytest-fxbucket (format {number}, this one reads {FORMAT}); upgrade pytest-fxbucket"
    )


def format_of(path: Path) -> int | None:
    """Return the format that the first line of the file at ``path`` names; None if it is no golden's, or no file."""
    # No more than a header is read: a file that is no golden may be one endless line.
    try:
        with path.open("rb") as file:
            found = re.fullmatch(HEADER.encode() + rb"(\d{1,9})\r?\n", file.readline(len(HEADER) + 12))
    except OSError:
        return None
    return int(found[1]) if found else None


def check_not_newer(path: Path) -> None:
    """Raise GoldenError if the golden at ``path`` has a newer format than this version's: it must not be overwritten."""
    number = format_of(path)
    if number is not None and number > FORMAT:
        raise _newer(number, str(path))


def _split_footer(rest: str) -> tuple[str, str | None]:
    """Return body and digest; None if the text does not end in a footer line of its own."""
    lines = rest.splitlines(keepends=True)
    if not lines or not re.fullmatch(FOOTER + r"[0-9a-f]{16}\n", lines[-1]):
        return rest, None
    return "".join(lines[:-1]), lines[-1].removeprefix(FOOTER).rstrip("\n")


def _behind_footer(rest: str) -> str | None:
    """Return the first line behind the first whole golden in ``rest``; None if there is no whole one."""
    for found in re.finditer(rf"^{FOOTER}([0-9a-f]{{16}})\n", rest, re.MULTILINE):
        # A line of a body may look like a footer: one that ends a golden has the digest of what stands above it.
        if found[1] == _digest(rest[: found.start()]):
            return rest[found.end() :].partition("\n")[0]
    return None


@dataclass(frozen=True, slots=True)
class GoldenStore:
    """The golden files below ``root``, named by plan path from ``rootdir`` and matrix id.

    >>> store = GoldenStore(Path("/project/golden"), Path("/project"))
    >>> store.path_for(Path("/project/fixtures/plans/llama.toml"), "fp32").as_posix()
    '/project/golden/fixtures/plans/llama.fp32.txt'
    """

    root: Path
    rootdir: Path
    test: tuple[str, ...] = ()
    """Arguments of pytest that run the test whose goldens these are; empty for goldens of plans."""

    def path_for_test(self, file: Path, name: str) -> Path:
        """Return the golden ``name`` of the tests in ``file``; GoldenError outside rootdir, or if a plan owns that file too."""
        if not file.is_relative_to(self.rootdir):
            raise GoldenError(f"{file} has no goldens: it lies outside rootdir {self.rootdir}; move it below")
        golden = self.root / file.relative_to(self.rootdir).with_suffix("") / f"{name}.txt"
        for plan, row in self._owners(golden):
            of = f"{_owner_text(self.shown(plan), row)} and to {self.shown(file)}"
            raise GoldenError(f"{self.shown(golden)} would belong to {of}; rename one of the two")
        return golden

    def path_for(self, plan_path: Path, matrix_id: str | None) -> Path:
        """Return the golden file of a plan; GoldenError if outside rootdir, or if another plan owns that file too."""
        golden = self._name(plan_path, matrix_id)
        owners = [_owner_text(self.shown(path), row) for path, row in self._owners(golden)]
        if len(owners) > 1:
            raise GoldenError(f"{self.shown(golden)} would belong to {' and to '.join(owners)}; rename a plan or a matrix row")
        return golden

    def read(self, path: Path) -> str:
        """Return the body of the golden at ``path``; GoldenError, one sentence, if it is missing or damaged."""
        where = self.shown(path)
        try:
            text = path.read_bytes().decode("utf-8")
        except FileNotFoundError:
            raise GoldenError(f"{where} is missing; write it with: {self.accept_command(path, 'new')}") from None
        except UnicodeDecodeError as error:
            raise GoldenError(
                f"{where} is not UTF-8 (byte {error.start}); restore it or accept it again: {self.accept_command(path)}"
            ) from None
        except OSError as error:
            raise GoldenError(self._unreadable(path, error)) from None
        # A checkout may have turned line feeds into CRLF; the digest in the last line is that of the text with line feeds.
        try:
            return parse(text.replace("\r\n", "\n"), where)
        except GoldenError as error:
            again = "accept it again"
            raise GoldenError(str(error).replace(again, f"{again}: {self.accept_command(path)}")) from None

    def _unreadable(self, path: Path, error: OSError) -> str:
        if reason := in_the_way(path, self.root):
            return reason.replace(f"{self.rootdir}/", "")
        where = self.shown(path)
        way = f"; make it readable first: chmod u+r {shlex.quote(where)}" if isinstance(error, PermissionError) else ""
        return f"{where} cannot be read: {error.strerror or error}{way}"

    def accept_command(self, path: Path, mode: str = "changed") -> str:
        """Return the command, run from rootdir, that accepts the golden at ``path``; ``mode`` is new, changed or all."""
        if self.test:
            return shlex.join(["pytest", *self.test, f"--fxbucket-accept={mode}"])
        plan, row = next(iter(self._owners(path)), (None, None))
        if plan is None:
            return f"pytest --fxbucket-plans=PLAN --fxbucket-accept={mode}"
        if any(end in self.shown(plan) for end in ("[", "::")):  # no argument of pytest can name
            named = f"golden[{row}]" if row else "golden and not golden["  # as the items of rows begin
            return shlex.join(["pytest", f"--fxbucket-plans={self.shown(plan)}", "-k", named, f"--fxbucket-accept={mode}"])
        item = f"{self.shown(plan)}::golden"
        words = ["pytest", f"{item}[{row}]" if row else item, f"--fxbucket-accept={mode}"]
        if not row and _matrix_ids(plan):
            # The bare name selects the items of all rows too, whose goldens nobody has reviewed.
            words.append(f"--deselect={item}[")
        return shlex.join(words)

    def _name(self, plan_path: Path, matrix_id: str | None) -> Path:
        try:
            below = Path(os.path.abspath(plan_path)).relative_to(self.rootdir)
        except ValueError:
            raise GoldenError(
                f"{plan_path} has no golden: it lies outside rootdir {self.rootdir}; move the plan below it, or set "
                "checks.golden = false"
            ) from None
        suffix = f".{matrix_id}" if matrix_id else ""
        name = f"{below.stem}{suffix}.txt"
        if not str(below).isprintable():
            raise GoldenError(
                f"{str(below)!r} has no golden: a path with control characters, or not in UTF-8, cannot stand in a text; "
                "rename the plan, or set checks.golden = false"
            )
        if len(os.fsencode(name)) > _LONGEST_NAME:
            raise GoldenError(
                f"{below.as_posix()} has no golden: {name[:20]}... would have {len(os.fsencode(name))} bytes, and a file name "
                f"has at most {_LONGEST_NAME}; give the plan or its matrix row a shorter name"
            )
        return self.root / below.with_name(name)

    def _owners(self, golden: Path) -> Iterator[tuple[Path, str | None]]:
        """Yield each (plan file, matrix id) on disk whose golden is ``golden``, the shortest file name first.

        ``a.b.txt`` belongs to row ``b`` of ``a.toml`` and to ``a.b.toml``. The files on disk are asked, not the plans of this
        run, so that the clash is found whichever of the two is run.
        """
        for plan, row in self.candidates(golden):
            if plan.is_file() and (not row or row in _matrix_ids(plan)):
                yield plan, row

    def candidates(self, golden: Path) -> Iterator[tuple[Path, str | None]]:
        """Yield each (plan file, matrix id) that ``golden`` could belong to, on disk or not, the shortest file name first."""
        parts = golden.name.removesuffix(".txt").split(".")
        folder = self.source_folder(golden)
        for cut in range(1, len(parts) + 1):
            yield folder / (".".join(parts[:cut]) + ".toml"), ".".join(parts[cut:]) or None

    def source_folder(self, golden: Path) -> Path:
        """Return the folder below rootdir that mirrors the folder of ``golden``: the one of its plan or test."""
        return self.rootdir / golden.relative_to(self.root).parent

    def shown(self, path: Path) -> str:
        """Return ``path`` as people read it: from rootdir if it lies below."""
        return path.relative_to(self.rootdir).as_posix() if path.is_relative_to(self.rootdir) else str(path)


def _matrix_ids(plan: Path) -> set[str]:
    """Return the ids of a plan's matrix rows; none if the file cannot be read, which the plan's own item reports."""
    import tomllib

    try:
        rows = tomllib.loads(plan.read_text(encoding="utf-8-sig")).get("matrix", [])
    except (OSError, ValueError):
        return set()
    return {str(row.get("id")) for row in rows if isinstance(row, dict)} if isinstance(rows, list) else set()


def _owner_text(plan: str, row: str | None) -> str:
    return f"{plan} (matrix row {row})" if row else plan
