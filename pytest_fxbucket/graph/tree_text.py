"""A module tree as ``print(model)`` shows one: classes nested, with counts, equal neighbours by number folded into one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_fxbucket.units import counted, human_bytes

if TYPE_CHECKING:
    from pytest_fxbucket.graph.tree import Tree


def tree_text(tree: Tree, number: int) -> str:
    """The module ``number`` and all below it; lines as ``torch.nn.Module.__repr__`` and ``torch.nn.ModuleList`` write them."""
    alike = _alike(tree, number)
    lines: list[str] = []
    # what is still to be written, last first: a module with its place and label, or a line that closes one
    left: list[tuple[int, str, int | None]] = [(0, "", number)]
    while left:
        depth, label, module = left.pop()
        indent = "  " * depth
        if module is None:
            lines.append(f"{indent})")
        elif not tree.children[module]:
            lines.append(f"{indent}{label}{tree.cls[module]}({_counts(tree, module)})")
        else:
            lines += [f"{indent}{label}{tree.cls[module]}(", f"{indent}  {_counts(tree, module)}"]
            left.append((depth, "", None))
            left += [(depth + 1, text, child) for text, child in reversed(list(_folded(tree, module, alike)))]
    return "\n".join(lines)


def _counts(tree: Tree, number: int) -> str:
    parts = [counted(sum(tree.calls[run] for run in tree.runs_of[number]), "node")]
    if held := tree.held[number]:
        parts += [counted(len(held), "parameter"), human_bytes(sum(tree.parameters[index].bytes for index in held))]
    return ", ".join(parts)


def _folded(tree: Tree, number: int, alike: dict[int, int]) -> Iterator[tuple[str, int]]:
    """Label and number of each child; of neighbours that are alike and count up, the first alone."""
    children = list(tree.children[number].items())
    at = 0
    while at < len(children):
        name, child = children[at]
        end = at + 1
        while (
            end < len(children) and _follows(children[end - 1][0], children[end][0]) and alike[children[end][1]] == alike[child]
        ):
            end += 1
        yield (f"({name}): " if end - at == 1 else f"({name}-{children[end - 1][0]}): {end - at} x "), child
        at = end


def _follows(name: str, other: str) -> bool:
    return name.isdigit() and other.isdigit() and int(other) == int(name) + 1


def _alike(tree: Tree, number: int) -> dict[int, int]:
    """A number for each module at and below ``number``: the same for those that would be written the same."""
    seen: dict[object, int] = {}
    found: dict[int, int] = {}
    for module in reversed(tree.inward(number)):
        below = tuple((name, found[child]) for name, child in tree.children[module].items())
        found[module] = seen.setdefault((tree.cls[module], _counts(tree, module), below), len(seen))
    return found
