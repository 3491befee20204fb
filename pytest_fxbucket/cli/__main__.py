"""``fxbucket``, which is ``python -m pytest_fxbucket.cli`` too: the table of subcommands, imported when they are used."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from pytest_fxbucket.cli.ctrl_c import STOPPED, noted
from pytest_fxbucket.cli.output import written
from pytest_fxbucket.errors import FxbucketError, UsageError

COMMANDS = {
    "init": "write a first plan for a model and print its module tree",
    "explain": "say what the pass makes of a plan, bucket by bucket, and why",
    "show": "print a plan's schedule as its golden has it, or every node of its graphs",
    "stages": "say what the pipeline stages of a plan hold, what crosses them, and how long ranks idle",
    "simulate": "say how long a plan's step takes on a cluster, what of its communication is exposed, and what memory holds",
    "tune": "search for a better plan on a cluster, and propose it as a diff, each change with what it gains",
    "mutate": "break the graph of a plan in many places, and say which of them its checks find",
    "fuzz": "try a pass on random steps, plans and options, and print each find as a test",
    "parity": "run a plan's step beside torch's own for many steps, bit for bit",
    "diff": "say how the schedules of two plans, passes or commits differ",
    "goldens": "say what changed in goldens since a commit, as a comment for a change",
    "compare": "time the steps of two commits side by side and say which is faster",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives 0, 1 if it could not be done, 2 if it was asked for wrongly, 130 or 141 if somebody ended it.

    130 is for Ctrl-C, 141 for a reader of its output who is gone; 2 also for output that cannot be written.
    """
    try:
        return written(lambda: _main(argv))
    except KeyboardInterrupt:
        print("fxbucket: stopped", file=sys.stderr)
        return STOPPED


def _main(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="fxbucket", description="Work on bucket plans outside pytest.")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="command")
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Before argparse: its own action wants the version when it is added, which would read the metadata in every run.
    if arguments == ["--version"]:
        from importlib.metadata import version

        print(f"pytest-fxbucket {version('pytest-fxbucket')}")
        return 0
    # For --help alone: beside other words it means nothing.
    parser.add_argument("--version", action="store_true", help="print the version")
    with noted() as ctrl_c:
        # Only the command that is named is imported, since that takes long. Ctrl-C meanwhile is heeded when it is done.
        for name, summary in COMMANDS.items():
            sub = subcommands.add_parser(name, help=summary, description=summary.capitalize() + ".")
            if name in arguments:
                import_module(f"pytest_fxbucket.cli.{name}").add_arguments(sub)
    ctrl_c.check()
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:  # argparse has said why
        return int(stop.code or 0)
    try:
        return int(import_module(f"pytest_fxbucket.cli.{options.command}").run(options))
    except UsageError as error:
        print(f"fxbucket: {error}", file=sys.stderr)
        return 2
    except FxbucketError as error:
        print(f"fxbucket: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
