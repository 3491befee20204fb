"""Outcomes of the zoo beside those that there must be, and the table of both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from suites.zoo.shelf import ZooModel
from suites.zoo.visit import MOST_ULPS, ROWS, Outcome

HEAD = """# The zoo

Models that nobody here wrote, tiny and random, and modules that are odd but ordinary. Each is checked on two ranks, in float32
and with `param_dtype = "bfloat16"`, `reduce_dtype = "float32"`, by a plan with the entries that `fxbucket init` proposes.

*Green*: audit, collectives and bitwise are green **and** the captured step's gradients, over two steps, are bit for bit those
of plain eager torch, averaged over the ranks' batches; *near*: but for rounding, for the reason that is named. *Refused*: a
sentence says which module, why, and what to do; the last column is that sentence, shortened. `make zoo` runs everything and
writes this table. `make test` runs a few; and it asks of each odd module in float32 that audit is green, with no other note
than must be, and that gradients are eager's, of some in bfloat16 and of some collectives and bitwise, too.
"""


def table_lines(models: Sequence[ZooModel], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The page docs/zoo.md."""
    found = {(one.library, one.model, one.row): one for one in outcomes}
    yield from HEAD.splitlines()
    yield from (
        "",
        *_counts(outcomes, len(models)),
        "",
        "| library | model | fp32 | bf16 | what was found |",
        "|---|---|---|---|---|",
    )
    for model in models:
        rows = [found[key] for row in ROWS if (key := (model.library, model.name, row)) in found]
        if rows:
            said = dict.fromkeys(_said(model, one) for one in rows)
            cells = [model.library, model.name, *(_word(one) for one in rows), "; ".join(filter(None, said))]
            yield f"| {' | '.join(cells)} |"


def _counts(outcomes: Sequence[Outcome], models: int) -> Iterator[str]:
    libraries: dict[str, dict[str, bool]] = {}
    for one in outcomes:
        known = libraries.setdefault(one.library, {})
        known[one.model] = known.get(one.model, True) and one.kind in ("green", "near")
    parts = [f"{sum(known.values())} of {len(known)} of {library}" for library, known in libraries.items()]
    visited = sum(map(len, libraries.values()))
    rest = f" {models - visited} of {models} models were not visited, and are not in the table." if visited < models else ""
    yield f"Green in both rows: {', '.join(parts)}.{rest}"


def _word(one: Outcome) -> str:
    return "**" + one.kind + "**" if one.kind not in ("green", "near", "refused") else one.kind


def _said(model: ZooModel, one: Outcome) -> str:
    if one.kind == "green" and one.nearness:
        return f"the same bits as eager that goes the traced way, near those of plain eager: {model.rounds}"
    if one.kind == "green":
        return ""
    return f"{one.row}: {re.sub(r'[^ ]+/', '', one.said)[:300]}".replace("|", "\\|").replace("\n", " ")


def wrong(model: ZooModel, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What is not as it must be with ``model``."""
    for one in outcomes:
        if (one.library, one.model) != (model.library, model.name):
            continue
        pattern = model.refused.get(one.row, model.refused.get(""))
        name = f"{one.library}.{one.model}[{one.row}]"
        if pattern is None and one.kind not in ("green", *(["near"] if model.near else [])):
            yield f"{name}: {one.kind}, where it must be green: {one.said}"
        elif pattern is None and one.nearness > MOST_ULPS:
            yield f"{name}: {one.nearness:.1f} ULPs from plain eager, where another order may come to {MOST_ULPS:g}"
        elif pattern is not None and one.kind != "refused":
            yield f"{name}: {one.kind}, where it must be refused: {one.said}"
        elif pattern is not None and not re.search(pattern, one.said):
            yield f'{name}: refused, but "{one.said}" does not say {pattern}'


def missing_lines(models: Sequence[ZooModel], wanted: Sequence[str], outcomes: Sequence[Outcome]) -> list[str]:
    """Names that were asked for and are no model's."""
    known = {f"{model.library}.{model.name}" for model in models}
    return [f"{name}: there is no such model" for name in wanted if name not in known]
