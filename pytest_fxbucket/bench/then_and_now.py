"""Two measurements of one plan beside each other, in words and numbers for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from pytest_fxbucket.bench.record import Record
from pytest_fxbucket.bench.stats import Estimate

_MOST_BUCKETS = 3


def table(old: Record, new: Record, then: Estimate, now: Estimate) -> list[str]:
    """Commits, ratios, medians, rounds, versions and launches in aligned columns."""
    rows = [("", "then", "now"), *_rows(old, new, then, now)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _rows(old: Record, new: Record, then: Estimate, now: Estimate) -> list[tuple[str, str, str]]:
    sides = (old, new)
    rows = [_row("commit", *map(commit, sides)), _row("bucketed/unbucketed", f"{then.ratio:.4f}", f"{now.ratio:.4f}")]
    for variant in ("bucketed", "unbucketed"):
        rows.append(_row(f"{variant}, median", *(ms(median_s(side, variant)) for side in sides)))
    rows.append(_row("rounds", *(" + ".join(str(len(rounds)) for rounds in side.samples["bucketed"]) for side in sides)))
    for name, values in (("pass", [side.pass_name for side in sides]), ("torch", [side.torch for side in sides])):
        rows.append(_row(name, *values))
    return [*rows, _row("Python", old.python, new.python), _row("launches", *(_launches(side) for side in sides))]


def _row(name: str, then: str, now: str) -> tuple[str, str, str]:
    return name, then, now


def said(old: Record, new: Record) -> list[str]:
    """What else a reader has to know to trust the numbers."""
    told = [
        f"{what} differs: {then} then, {now} now"
        for what, then, now in (
            ("pass", old.pass_name, new.pass_name),
            ("torch", old.torch, new.torch),
            ("Python", old.python, new.python),
        )
        if then != now
    ]
    for which, record in (("then", old), ("now", new)):
        if record.dirty:
            told.append(f"{which} the work tree was dirty: files differ from commit {(record.commit or '')[:7]}")
        if not record.is_stable:
            told.append(f"{which} step time had not settled when sampling began")
    return told


def is_unbucketed_faster_alone(old: Record, new: Record) -> bool:
    """Whether by the medians the bucketed step is no slower than then, and the unbucketed one became faster."""
    bucketed, unbucketed = (median_s(new, name) - median_s(old, name) for name in ("bucketed", "unbucketed"))
    return bucketed <= 0 > unbucketed


def is_unbucketed_another(old: Record, new: Record) -> bool:
    """Whether the unbucketed step became another one: by its graph, or by the torch or Python that runs it."""
    sides = ((side.graphs.get("unbucketed", {}).get("digest"), side.torch, side.python) for side in (old, new))
    return len(set(sides)) > 1


def grown(old: Record, new: Record) -> list[str]:
    """The buckets whose wait blocks longer than before, those that grew most first."""
    before = _exposed(old)
    longer = sorted(
        ((now - before.get(key, 0.0), key, now) for key, now in _exposed(new).items() if now > before.get(key, 0.0)),
        key=lambda each: (-each[0], each[1]),
    )
    told = []
    for _, key, now in longer[:_MOST_BUCKETS]:
        then = ms(before[key]) if key in before else "no such bucket"
        told.append(f"  {key[0]} ({key[1]}{f', {key[2] + 1}' if key[2] else ''}): {then} then, {ms(now)} now")
    return ["exposed time that grew most:", *told] if told else []


def _exposed(record: Record) -> dict[tuple[str, str, int], float]:
    """By label, direction and how many of that name came before: seconds that the bucket's wait blocks."""
    found: dict[tuple[str, str, int], float] = {}
    buckets: Sequence[Mapping[str, Any]] = record.graphs.get("bucketed", {}).get("buckets", ())
    for bucket in buckets:
        name = (bucket["label"], bucket["direction"])
        count = sum(key[:2] == name for key in found)
        if bucket["exposed_s"] is not None:
            found[*name, count] = bucket["exposed_s"]
    return found


def _launches(record: Record) -> str:
    return str(record.graphs.get("bucketed", {}).get("launches", "?"))


def median_s(record: Record, variant: str) -> float:
    """Median of all samples, in seconds."""
    return median(sample for rounds in record.samples[variant] for sample in rounds)


def commit(record: Record) -> str:
    """The measured commit as people write it."""
    if record.commit is None:
        return "no commit"
    return f"{record.commit[:7]}{' with changes' * record.dirty}"


def ms(seconds: float) -> str:
    """In milliseconds, to the microsecond."""
    return f"{1000 * seconds:.3f} ms"
