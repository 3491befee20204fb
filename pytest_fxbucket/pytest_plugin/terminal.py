"""What a person reads: header, failures and summary as generators of lines, and messages during long waits."""

from __future__ import annotations

import importlib.metadata
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import pytest

from pytest_fxbucket.artifacts import why_elsewhere
from pytest_fxbucket.compat.versions import TESTED, is_tested
from pytest_fxbucket.pytest_plugin.session import PlanResult
from pytest_fxbucket.words import human_bytes

if TYPE_CHECKING:
    from pytest_fxbucket.checks.verdict import Verdict
    from pytest_fxbucket.errors import FxbucketError
    from pytest_fxbucket.pytest_plugin.options import Options


def header_lines(options: Options, plans: int) -> Iterator[str]:
    """Yield the one header line, if any plan file was named."""
    if not plans:
        return
    parts = [f"{plans} plan file{'s' if plans > 1 else ''}", f"pass {options.pass_name or 'as planned'}"]
    parts.append(f"backend {options.backend}" if options.backend else "backend as planned")
    if options.accept:
        parts.append(f"accepting goldens: {options.accept}")
    yield "fxbucket: " + ", ".join([*parts, torch_text(importlib.metadata.version("torch"))])


def torch_text(version: str) -> str:
    """Name torch's version, and the tested versions if this is none of them."""
    if is_tested(version):
        return f"torch {version}"
    return f"torch {version} (untested; tested: {', '.join(f'{known} on {device}' for known, device in TESTED)})"


def failure_lines(verdict: Verdict) -> Iterator[str]:
    """Yield what a failed check says: its summary, its lines, and the folder where more lies."""
    if not verdict.lines or verdict.lines[0] != verdict.summary:
        yield verdict.summary
    yield from verdict.lines
    if verdict.folder is not None:
        why = why_elsewhere(verdict.folder)
        yield f"graphs, report and rank logs: {verdict.folder}" + (f" ({why})" if why else "")


def error_text(error: FxbucketError) -> str:
    """Return the sentence of an error; all its lines if it has more to show, such as a rank's traceback."""
    lines: Callable[[], Iterable[str]] | None = getattr(error, "lines", None)
    return "\n".join(lines()) if lines else str(error)


def record(results: dict[str, PlanResult], report: pytest.TestReport) -> None:
    """Add the outcome of one plan item's phase to ``results``, keyed by the plan as its node ids write it."""
    path, name = parts_of(report.nodeid)
    sent: Mapping[str, object] | None = getattr(report, "fxbucket", None)
    if not path.endswith(".toml") or not (report.failed or (sent is not None and report.when == "call")):
        return
    # All checks of one matrix row share a line, so the key has the row and not the check.
    check, bracket, row = name.partition("[")
    result = results.setdefault(path + bracket + row, PlanResult())
    result.outcomes[check] = _outcome(report)
    if sent is not None:
        sizes, note = sent.get("sizes"), sent.get("note")
        result.sizes = sizes if isinstance(sizes, dict) else result.sizes
        if isinstance(note, str):
            result.notes[check] = note


def parts_of(nodeid: str) -> tuple[str, str]:
    """Return the path of a plan and the name of its item; the path may contain ``::``, too."""
    path, found, name = nodeid.partition(".toml::")
    return path + found.removesuffix("::"), name


def _outcome(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        # A skip of ours begins with the name of the item, which stands before the outcome already.
        return f"skipped ({report.longrepr[2].removeprefix('Skipped: ').partition(': ')[2]})"
    return report.outcome if report.when == "call" else "error"


def summary_lines(results: Mapping[str, PlanResult], verbosity: int, always: Collection[str] = ()) -> Iterator[str]:
    """Yield one line for each plan: launches before and after, buckets, bytes, outcomes; verdicts below it with -v.

    Verdicts of the checks ``always`` are there without it too.
    """
    for plan, result in sorted(results.items()):
        outcomes = ", ".join(f"{check} {outcome}" for check, outcome in result.outcomes.items())
        yield f"{plan}: {sizes_text(result.sizes)}{outcomes}"
        for check, note in result.notes.items():
            if verbosity > 0 or check.partition("@")[0] in always:
                yield from textwrap.wrap(f"{check}: {note}", 120, initial_indent="    ", subsequent_indent="        ")


def sizes_text(sizes: Mapping[str, int] | None) -> str:
    """Say launches before and after, buckets and bytes; nothing if the pass never ran."""
    if sizes is None:
        return ""
    launches = f"{sizes['launches_before']} → {sizes['launches_after']} launches"
    return f"{launches}, {sizes['buckets']} buckets, {human_bytes(sizes['bytes'])}; "


def wait_printer(config: pytest.Config) -> Callable[[str], None] | None:
    """Return a function that prints one line while an item runs; None in workers, files and pipes, where nobody watches."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    if reporter is None or capture is None or not (reporter.isatty or reporter.verbosity > 0 or config.option.capture == "no"):
        return None

    def show(line: str) -> None:
        with capture.global_and_fixture_disabled():
            reporter.write_line(line)
            reporter.flush()

    return show
