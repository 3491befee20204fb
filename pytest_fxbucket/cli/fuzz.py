"""``fxbucket fuzz``: random steps, plans and options against a pass; each find cut short, printed as a test and kept."""

from __future__ import annotations

import sys
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.cli.common import add_json, print_json, refuse_no_pass, refuse_not_above
from pytest_fxbucket.cli.ctrl_c import STOPPED, CtrlC, noted
from pytest_fxbucket.errors import FxbucketError, UsageError
from pytest_fxbucket.progress import on_stderr
from pytest_fxbucket.user_code import user_code
from pytest_fxbucket.words import counted

if TYPE_CHECKING:
    from pytest_fxbucket.fuzz.corpus import StoredFind

_SECONDS = 300.0
_RANKS = 2
_MOST_RANKS = 8
_AT_MOST = 50
_SAY_EVERY_S = 2.0
_IMPORTED = ("hypothesis", "torch", "torch.distributed", "pytest_fxbucket.compat.c10d", "pytest_fxbucket.fuzz.search")
"""Imports that take long, one by one, so that Ctrl-C is heeded between them."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``fxbucket fuzz``."""
    meaning = "manual (the default), torch or module:callable"
    parser.add_argument("--pass", dest="pass_name", default="manual", metavar="PASS", help=meaning)
    parser.add_argument(
        "--seconds", type=float, default=_SECONDS, metavar="S", help=f"how long it looks (default: {_SECONDS:g})"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which programs are drawn (default: 0)")
    parser.add_argument(
        "--ranks", type=int, default=_RANKS, metavar="N", help=f"of each program, 2 to {_MOST_RANKS} (default: {_RANKS})"
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        default=Path("fuzz-corpus"),
        metavar="FOLDER",
        help="where finds are kept, a test each; what is there is tried first (default: fuzz-corpus)",
    )
    parser.add_argument(
        "--at-most", type=int, default=_AT_MOST, metavar="N", help=f"end after so many finds (default: {_AT_MOST})"
    )
    add_json(parser)


def run(options: Namespace) -> int:
    """Replay, search and tell; gives 1 if anything was found, 2 if it could not be told, 130 if Ctrl-C ended it."""
    try:
        with noted() as ctrl_c:
            return _run(options, ctrl_c)
    except FxbucketError as error:
        print(f"fxbucket: {error}", file=sys.stderr)
    except BrokenPipeError:
        # A reader who is gone is no failed search: the command ends quietly.
        raise
    except Exception:  # 1, Python's own status for it, means here that something was found
        traceback.print_exc()
    return 2


def _refuse(options: Namespace) -> None:
    """Raise FxbucketError for what cannot be searched."""
    refuse_no_pass(options.pass_name)
    if "," in options.pass_name:
        raise UsageError(f"--pass {options.pass_name}: fuzz tries one pass; name one of them")
    for option, least in (("seconds", 0), ("at_most", 0), ("ranks", 1)):
        refuse_not_above(least, f"--{option.replace('_', '-')}", getattr(options, option))
    if options.ranks > _MOST_RANKS:
        raise UsageError(f"--ranks {options.ranks}: expected 2 to {_MOST_RANKS}")
    if find_spec("hypothesis") is None:
        raise FxbucketError("fxbucket fuzz needs hypothesis: pip install 'pytest-fxbucket[fuzz]'")


def _run(options: Namespace, ctrl_c: CtrlC) -> int:
    _refuse(options)
    hunt = _Hunt(options)
    progress = on_stderr(_SAY_EVERY_S)
    try:
        with redirect_stdout(sys.stderr), user_code([Path.cwd()]), progress.watching(f"fuzz {options.pass_name}"):
            hunt.look(progress.say, ctrl_c)
    except KeyboardInterrupt:
        hunt.ended = "stopped"
    except Exception as error:
        # Finds are told even if the search broke behind them; without any the error is all there is to say.
        if not isinstance(error, FxbucketError):
            traceback.print_exc()
        elif hunt.again or hunt.new:
            print(f"fxbucket: {error}", file=sys.stderr)
        else:
            raise
        hunt.ended = "broke"
    if options.json:
        print_json(hunt.document())
    else:
        for line in hunt.lines():
            print(line)
    return {"stopped": STOPPED, "broke": 2}.get(hunt.ended, int(bool(hunt.again or hunt.new)))


class _Hunt:
    """What was replayed and found so far."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.again: list[StoredFind] = []
        """Finds of the corpus that are still there."""
        self.mended: list[Path] = []
        self.new: list[tuple[StoredFind, str]] = []
        """New finds, each with the sentence of real ranks; "" if they were not asked."""
        self.tried = 0
        self.ended = "time"

    def look(self, say: Callable[[str], None], ctrl_c: CtrlC) -> None:
        """Replay the corpus, then search until the time is over, or enough was found; raises KeyboardInterrupt in between."""
        say("importing torch")
        for name in _IMPORTED:
            import_module(name)
            ctrl_c.check()
        from hypothesis.configuration import set_hypothesis_home_dir

        from pytest_fxbucket.fuzz.corpus import files_in, keep, replayed, to_keep
        from pytest_fxbucket.fuzz.on_ranks import on_real_ranks
        from pytest_fxbucket.fuzz.search import Search
        from pytest_fxbucket.fuzz.tried_pass import subject_of
        from pytest_fxbucket.ranks.pools import Pools

        options = self.options
        # Imports do not count, but to replay the corpus does.
        until = time.monotonic() + options.seconds
        subject = subject_of(options.pass_name)
        ctrl_c.check()
        for path in files_in(options.corpus):
            ctrl_c.check()
            say(f"replaying {path}")
            kept = replayed(path, subject)
            self.tried += 1
            if kept is None:
                self.mended.append(path)
            else:
                self.again.append(kept)
        # So that the search finds nothing that the corpus has already.
        known = [one.find for one in self.again]
        search = Search(subject, options.ranks, options.seed, until, say, known, options.at_most, ctrl_c.check)
        pools = Pools()
        home = TemporaryDirectory()  # hypothesis writes what it reads of the sources there, else into the working folder
        set_hypothesis_home_dir(home.name)
        try:
            for trial, find in search.finds():
                kept = to_keep(options.corpus, trial, find, options.pass_name)
                # Counted as found before it is written, which a full disk refuses, and before real ranks are asked, which may
                # take long: Ctrl-C meanwhile does not lose the find.
                self.new.append((kept, ""))
                keep(kept)
                say(f"on {options.ranks} real ranks: {find.kind}")
                with ctrl_c.at_once():
                    self.new[-1] = kept, on_real_ranks(pools, trial, find, subject)
                if len(self.new) >= options.at_most:
                    self.ended = "enough"
                    break
        finally:
            self.tried += search.tried
            pools.close()
            set_hypothesis_home_dir(None)
            home.cleanup()

    def lines(self) -> Iterator[str]:
        """For people."""
        for kept, real in self.new:
            yield f"# {kept.path}"
            if real:
                yield f"# {real}"
            yield kept.text
        for kept in self.again:
            yield f"still there: {kept.path}: {kept.find.kind}: {kept.find.says}"
        for path in self.mended:
            yield f"mended: {path}"
        for kept, real in self.new:
            yield f"new: {kept.path}: {kept.find.kind}: {kept.find.says}" + (f" ({real})" if real else "")
        found = f"{counted(len(self.new), 'new find')}, {len(self.again)} of the corpus still there, {len(self.mended)} mended"
        yield f"{self.options.pass_name}: {counted(self.tried, 'program')} tried; {found}{_ENDED[self.ended]}"
        if any(kept.path.exists() for kept, _ in self.new):
            yield f"run them with: pytest {self.options.corpus}"

    def document(self) -> dict[str, Any]:
        """For programs."""
        return {
            "pass": self.options.pass_name,
            "ranks": self.options.ranks,
            "seed": self.options.seed,
            "tried": self.tried,
            "ended": self.ended,
            "new": [{**_document(kept), "real_ranks": real or None} for kept, real in self.new],
            "still_there": [_document(kept) for kept in self.again],
            "mended": [str(path) for path in self.mended],
        }


_ENDED = {
    "time": "",
    "enough": "; ended by --at-most",
    "stopped": "; stopped, this is what was found so far",
    "broke": "; it broke then, and stderr says why",
}


def _document(kept: StoredFind) -> dict[str, Any]:
    return {"file": str(kept.path), "kind": kept.find.kind, "says": kept.find.says, "test": kept.text}
