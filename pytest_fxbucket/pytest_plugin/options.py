"""The one table of options, each with its ini twin, read once into a frozen Options."""

from __future__ import annotations

import copy
import glob
import os
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from pytest_fxbucket.backends import CHOICES
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.files import plans_below
from pytest_fxbucket.golden.accept import MODES
from pytest_fxbucket.pass_names import no_pass
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.words import one_or_other


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One option: ``--fxbucket-<name>`` and its ini twin ``fxbucket_<name>``.

    Without ``metavar``: a switch, which takes no value, if the ini is a bool; else there is only the ini, and no option.
    """

    name: str
    help: str
    metavar: str | None = None
    ini_type: Literal["string", "linelist", "bool"] = "string"
    ini_default: str | tuple[str, ...] | bool = ""

    @property
    def flag(self) -> str:
        """Return the command line spelling."""
        return f"--fxbucket-{self.name}"

    @property
    def dest(self) -> str:
        """Return the ini name, which is the attribute on config.option too."""
        return f"fxbucket_{self.name.replace('-', '_')}"


TABLE = (
    OptionRow("plans", "bucket plans to run: files, folders (every *.toml below), globs", "PATH[,PATH..]", "linelist", ()),
    OptionRow("pass", "passes to check instead of the plan's, in order: manual, torch, or module:callable", "PASS[,PASS..]"),
    OptionRow("accept", "write goldens: new, changed or all; the ini says what the bare flag means", "MODE", ini_default="all"),
    OptionRow("prune", "remove goldens that no plan and no test owns", ini_type="bool", ini_default=False),
    OptionRow("backend", f"process group backend instead of the plan's: {', '.join(CHOICES)}", "BACKEND"),
    OptionRow(
        "require-gpus",
        "too few GPUs for backend nccl or gloo:cuda, or for auto to be nccl, fail instead of being skipped or passed over",
        ini_type="bool",
        ini_default=False,
    ),
    OptionRow(
        "compare",
        "compare step time with a stored run: latest, a file of pytest-benchmark, or a commit, branch or tag; a file wins over "
        "a branch of its name",
        "REF|FILE|latest",
    ),
    OptionRow("report", "write pages of step time, and a trace of one step for Perfetto, to this folder", "DIR"),
    OptionRow("golden", "folder of the goldens, below rootdir", ini_default="golden"),
)


@dataclass(frozen=True, slots=True)
class Options(RunSettings):
    """What the command line and the ini file ask for, checked: how plans are run, and what else is done."""

    plans: tuple[Path, ...] = ()
    """plan files, absolute, each once, in the order given (a folder's and a glob's sorted)"""
    prune: bool = False
    """goldens that nobody owns are removed"""
    is_collect_only: bool = False
    """nothing is run"""
    report: Path | None = None
    """folder for pages of step time, absolute; None: none are written"""
    compare: str | None = None
    """what step time is compared with: latest, a commit as git calls it, or the absolute path of a file"""

    def shown(self, path: Path) -> str:
        """Return ``path`` as people and node ids write it: from rootdir if it lies below."""
        return Path(os.path.relpath(path, self.rootdir)).as_posix()


def add_options(parser: pytest.Parser) -> None:
    """Add every row of the table to pytest's parser."""
    group = parser.getgroup("fxbucket", "FSDP bucket plans (pytest-fxbucket)")
    for row in TABLE:
        if row.metavar:
            how: dict[str, Any] = {"nargs": "?", "const": ""} if row.name == "accept" else {}
            if row.ini_type == "linelist":
                how["action"] = "append"  # the last alone would be a run of fewer plans than were named
            group.addoption(row.flag, dest=row.dest, metavar=row.metavar, default=None, help=row.help, **how)
        elif row.ini_type == "bool":
            group.addoption(row.flag, dest=row.dest, action="store_true", default=None, help=row.help)
        parser.addini(row.dest, row.help, type=row.ini_type, default=row.ini_default)


def close_bare_accept(args: list[str], flag: str = "--fxbucket-accept") -> bool:
    """Rewrite a bare ``--fxbucket-accept`` in ``args``, in place, as ``--fxbucket-accept=``, so it never eats a path."""
    end = args.index("--") if "--" in args else len(args)  # behind it all are paths
    closed = [f"{arg}=" if arg == flag else arg for arg in args[:end]]
    changed, args[:end] = closed != args[:end], closed
    return changed


def reparse(config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Parse the known options in ``args`` again, after they were rewritten."""
    config.known_args_namespace = parser.parse_known_args(args, namespace=copy.copy(config.option))


def add_accept_alias(parser: pytest.Parser, args: list[str]) -> None:
    """Add ``--accept``, unless a plugin or a conftest has an option of that name."""
    # The namespace gets the default of every option that there is, so it shows whether one is stored as "accept".
    if hasattr(parser.parse_known_args([], namespace=Namespace()), "accept"):
        return
    parser.getgroup("fxbucket").addoption(
        "--accept", dest="fxbucket_accept", metavar="MODE", nargs="?", const="", help="the same as --fxbucket-accept"
    )
    close_bare_accept(args, "--accept")


def read_options(config: pytest.Config) -> Options:
    """Read and check every option; pytest.UsageError, one sentence that names the flag, for a value that cannot be."""
    pass_name = _pass_name(*_value(config, "pass"))
    accept = _accept(config)
    if accept and pass_name not in (None, "manual"):
        raise pytest.UsageError(
            f"--fxbucket-accept with --fxbucket-pass={pass_name}: goldens belong to the plan, so they are accepted "
            "with the plan's own pass only; leave out one of the two"
        )
    prune = _switch(config, "prune")
    plans = tuple(_plans(config))
    return Options(
        rootdir=config.rootpath,
        artifacts=config.rootpath / ".fxbucket",
        plans=plans,
        pass_name=pass_name,
        accept=accept,
        prune=prune,
        is_collect_only=bool(config.option.collectonly),
        backend=_backend(*_value(config, "backend")),
        require_gpus=_switch(config, "require_gpus"),
        report=_report(config),
        golden_dir=_golden_dir(config, is_written=bool(accept or prune)),
        compare=_compare(config, plans),
    )


def _value(config: pytest.Config, name: str) -> tuple[str, str]:
    """Return an option's text and the spelling to name in an error, which tells the command line, even empty, from the ini."""
    given = config.getoption(f"fxbucket_{name}")
    if given is not None:
        return str(given), f"--fxbucket-{name}"
    return str(config.getini(f"fxbucket_{name}")), f"ini fxbucket_{name}"


def _is_given(where: str) -> bool:
    return where.startswith("--")


def _base(config: pytest.Config, where: str) -> Path:
    """Return where relative paths begin: where pytest was started, or of the ini its own folder, as pytest's paths do."""
    return config.invocation_params.dir if _is_given(where) or config.inipath is None else config.inipath.parent


def _switch(config: pytest.Config, name: str) -> bool:
    try:
        return bool(config.getoption(f"fxbucket_{name}") or config.getini(f"fxbucket_{name}"))
    except (ValueError, pytest.UsageError) as error:
        raise pytest.UsageError(f"ini fxbucket_{name}: {error}; expected true or false") from error


def _pass_name(text: str, where: str) -> str | None:
    if not text and not _is_given(where):
        return None
    if problem := no_pass(text):
        raise pytest.UsageError(f"{where}: {problem}")
    return text


def _accept(config: pytest.Config) -> str | None:
    # None: the option is not there. Empty: it stands alone, and the ini says what that means.
    given = config.getoption("fxbucket_accept")
    if given is None:
        return None
    if not given and _is_ci():
        raise pytest.UsageError(
            "--fxbucket-accept without a value where CI is set in the environment: there nobody sees what is accepted, so say "
            "what to accept, e.g. --fxbucket-accept=all"
        )
    text, where = (given, "--fxbucket-accept") if given else (config.getini("fxbucket_accept"), "ini fxbucket_accept")
    if text not in MODES:
        raise pytest.UsageError(f"{where}: {text!r} is no mode; expected new, changed or all{_nearest(text, MODES)}")
    return str(text)


def _is_ci() -> bool:
    """Say whether CI is set in the environment, as continuous integration does."""
    return os.environ.get("CI", "").strip().lower() not in ("", "0", "false")


def _backend(text: str, where: str) -> str | None:
    if text and text not in CHOICES:
        known = one_or_other([*CHOICES])
        raise pytest.UsageError(f"{where}: {text!r} is no backend; expected {known}{_nearest(text, CHOICES)}")
    return text or None


def _report(config: pytest.Config) -> Path | None:
    """Return the folder that pages go to; what would fail when the run ends is refused when it begins."""
    text, where = _value(config, "report")
    if not text:
        if _is_given(where):
            raise pytest.UsageError(f"{where}: no folder given; expected where to write the pages, e.g. {where}=report")
        return None
    folder = Path(os.path.normpath(_base(config, where) / text))
    # Folders that are not there yet are made below the nearest one that is, so that one is asked.
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise pytest.UsageError(f"{where}: {nearest} is a file; expected a folder, or nothing yet")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise pytest.UsageError(f"{where}: {nearest} may not be written to; expected a folder that may")
    from pytest_fxbucket.bench.report.page import lacks_pictures

    if problem := lacks_pictures():
        raise pytest.UsageError(f"{where}: {problem}")
    return folder


def _golden_dir(config: pytest.Config, is_written: bool) -> Path:
    folder = Path(os.path.normpath(config.rootpath / str(config.getini("fxbucket_golden"))))
    if not folder.is_relative_to(config.rootpath):
        raise pytest.UsageError(
            f"ini fxbucket_golden: {folder} lies outside rootdir {config.rootpath}; goldens go with the plans"
        )
    if is_written and folder.exists() and not folder.is_dir():
        raise pytest.UsageError(f"ini fxbucket_golden: {folder} is a file; expected the folder of the goldens, or nothing yet")
    return folder


def _compare(config: pytest.Config, plans: tuple[Path, ...]) -> str | None:
    text, where = _value(config, "compare")
    if not text.strip() and (not _is_given(where) or str(config.getini("fxbucket_compare")).strip()):
        return None  # an empty value on the command line turns the ini's off
    from pytest_fxbucket.bench.store import compared_with

    try:
        return compared_with(text, where, _base(config, where), next(iter(plans), config.rootpath / "pytest.ini"))
    except FxbucketError as error:
        raise pytest.UsageError(str(error)) from None


def _plans(config: pytest.Config) -> Iterator[Path]:
    entries: list[str] | None = config.getoption("fxbucket_plans")
    where = "--fxbucket-plans" if entries is not None else "ini fxbucket_plans"
    if entries is None and not (entries := config.getini("fxbucket_plans")):
        return
    named = [[text.strip() for text in entry.split(",") if text.strip()] for entry in entries]
    if not all(named):
        raise pytest.UsageError(f"{where}: no path given; expected plan files, folders or globs, parted by commas")
    yield from dict.fromkeys(path for texts in named for text in texts for path in _expand(text, _base(config, where), where))


def _expand(text: str, base: Path, where: str) -> list[Path]:
    """Return the plan files that one file, folder or glob stands for."""
    path = Path(os.path.normpath(base / text))
    if path.is_dir():
        found = plans_below(path)
    elif path.is_file():
        if path.suffix != ".toml":
            raise pytest.UsageError(f"{where}: {text} is no plan file; expected a *.toml")
        found = [path]
    elif path.is_symlink():
        raise pytest.UsageError(f"{where}: {text} is a link that leads nowhere")
    elif glob.has_magic(text):
        # Brackets are the user's own only in what the user wrote.
        names = glob.glob(os.path.join(glob.escape(str(base)), text), recursive=True)
        found = [Path(name) for name in sorted(map(os.path.normpath, names)) if name.endswith(".toml")]
    else:
        near = _nearest(path.name, sorted(entry.name for entry in path.parent.glob("*")), Path(text).parent)
        raise pytest.UsageError(f"{where}: {text} is not there{near}")
    if not found:
        raise pytest.UsageError(f"{where}: no plan file (*.toml) in {text}")
    return found


def _nearest(text: str, known: Iterable[str], folder: Path | None = None) -> str:
    import difflib

    near = difflib.get_close_matches(text, list(known), n=1)
    if not near:
        return ""
    return f"; did you mean {folder / near[0] if folder else near[0]}?"
