"""Expressions, differences and waste in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.graph.modules import module_of
from pytest_fxbucket.same.table import LIST, Const, Key, Table, Where

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.same.comparing import Difference, Waste

_DEPTH = 3
_MOST = 240
"""Letters of an expression that are shown."""
_NAMES = 3


def expression_text(table: Table, number: int, depth: int = _DEPTH) -> str:
    """The expression ``number``, as far as people read it: ``mul(w1 gathered over 0-3, 2.0)``."""
    key = table.keys[number]
    kind = str(key[0])
    if depth == 0 and kind not in ("input", "undefined", "zeros"):
        return "..."
    if kind in _FORMS:
        return _FORMS[kind](table, key, depth)
    shown = [_part(table, part, depth - 1) for part in key[1:]]
    if kind == LIST:
        return "[" + ", ".join(shown) + "]"
    return f"{kind.removeprefix('aten::')}({', '.join(one for one in shown if one != 'None')})"


def _reduction(table: Table, key: Key, depth: int) -> str:
    sources = dict.fromkeys(one for one, *_ in key[1]) if key[0] == "scattered" else (key[1],)
    of = ", ".join(expression_text(table, one, depth) for one in list(sources)[:2])
    op, dtype, ranks = key[-3].text.strip("'"), _short(key[-2].text), _span(key[-1].text)
    return f"{op} in {dtype} over ranks {ranks} of {of}{', scattered' if key[0] == 'scattered' else ''}"


def _part(table: Table, part: Any, depth: int) -> str:
    if type(part) is int:
        return expression_text(table, part, max(depth, 0))
    if type(part) is Const:
        return _short(part.text)
    if type(part) is tuple:
        return "[" + ", ".join(_part(table, one, depth) for one in part if one != LIST) + "]"
    return "" if type(part) is Where else str(part)


def _bytes(table: Table, key: tuple[Any, ...], depth: int) -> str:
    """What bytes are of, and in which order if that is not plainly theirs."""
    sources = list(dict.fromkeys(source for source, _ in key[2]))
    shown = ", ".join(expression_text(table, one, depth) for one in sources[:_NAMES])
    more = f" and {len(sources) - _NAMES} more" if len(sources) > _NAMES else ""
    places = [at for _, at in key[2]]
    plain = len(places) == 1 and (places[0].start, max(places[0].rank, 0)) == (0, 0)
    runs = "" if plain else "; bytes " + ", ".join(_run(at) for at in places[:_NAMES]) + (", ..." if places[_NAMES:] else "")
    return f"{shown}{more} ({key[1].text}{runs})"


def _run(at: Where) -> str:
    rank = "" if at.rank < 0 else f" of rank {at.rank}" if at.times == 1 else f" of ranks {at.rank}-{at.rank + at.times - 1}"
    return f"{at.start} to {at.start + at.length}{rank}"


def _short(text: str) -> str:
    return text.removeprefix("torch.")


def _span(text: str) -> str:
    ranks = text.split(",")
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 2 else text


def cut(text: str) -> str:
    """``text``, as long as a line may be."""
    return text if len(text) <= _MOST else text[: _MOST - 4] + " ..."


def node_text(node: fx.Node | None) -> str:
    """A node of the graph after, with its module."""
    if node is None:
        return "an output"
    module = module_of(node)
    return f"{node.name} ({node.target})" + (f" in {module}" if module else "")


def difference_text(table: Table, one: Difference) -> str:
    """A sentence for people, with both expressions."""
    names = ", ".join(one.names[:_NAMES]) + (f" and {len(one.names) - _NAMES} more" if len(one.names) > _NAMES else "")
    before, after = (cut(expression_text(table, number)) for number in (one.before, one.after))
    return f"{names}: first differs at {node_text(one.node)}, which gives {after}; before the pass it was {before}"


def waste_text(one: Waste) -> str:
    """A sentence for people."""
    before, after = one.times
    if before == 0:
        return f"waste: {node_text(one.node)} computes what nobody reads and what was not computed before the pass"
    return (
        f"waste: what {node_text(one.node)} computes is computed {after} times, expected {before} as before the pass; "
        "the values are the same"
    )


_FORMS: dict[str, Callable[[Table, Key, int], str]] = {
    "undefined": lambda table, key, depth: "nothing that was written",
    "zeros": lambda table, key, depth: "zeros",
    "start": lambda table, key, depth: "the beginning",
    "input": lambda table, key, depth: str(key[1].text).rpartition(" ")[0],
    "attribute": lambda table, key, depth: f"a constant {key[1].text[:8]}",
    "cast": lambda table, key, depth: f"{_part(table, key[1], depth)} as {_short(key[3].text)}",
    "gathered": lambda table, key, depth: f"{_part(table, key[1], depth)} gathered over ranks {_span(key[2].text)}",
    "bytes": lambda table, key, depth: _bytes(table, key, depth),
    "scattered": _reduction,
    "reduced": _reduction,
    "seen": lambda table, key, depth: (
        f"{_part(table, key[1], depth)} as left by {_part(table, next(n for n in key[2] if n), depth)}"
    ),
    "write": lambda table, key, depth: _part(table, key[3], depth),
    **dict.fromkeys(("written", "drawn", "done", "after"), lambda table, key, depth: _part(table, key[1], depth)),
    "_operator.getitem": lambda table, key, depth: f"{_part(table, key[1], depth)}[{_part(table, key[2], depth)}]",
}
"""How expressions of some kinds are shown."""
