"""What to say of a module that a graph does not have: put together when somebody reads it, which ``hasattr`` never does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.errors import NoModuleError
from pytest_fxbucket.graph.globs import is_glob
from pytest_fxbucket.plan.hints import some
from pytest_fxbucket.units import nearest

if TYPE_CHECKING:
    from pytest_fxbucket.graph.tree import Tree


class MissingModuleError(NoModuleError):
    """The module ``asked``, a name or an index, that the module ``number`` of ``tree`` does not have."""

    def __init__(self, tree: Tree, number: int, asked: object) -> None:
        super().__init__(tree, number, asked)
        self.tree, self.number, self.asked = tree, number, asked

    def __str__(self) -> str:
        tree, number = self.tree, self.number
        names = list(tree.children[number])
        where = ".".join(tree.path(number)) or "the graph"
        has = f"its modules are {some(names, 6)}" if names else "it has no modules in it"
        if isinstance(self.asked, int):
            return f"{where} has no module of index {self.asked}, but {len(names)} modules; {has}"
        if not isinstance(self.asked, str):
            return f"{where} is asked for a module by a {type(self.asked).__name__}, expected its name or its index"
        if is_glob(self.asked):
            return f"{where} has no module called {self.asked!r}; ask find() for what a glob names"
        below = [".".join(tree.path(n)[len(tree.path(number)) :]) for n in tree.inward(number)[1:]]
        near = nearest(self.asked, below if "." in self.asked else names) or nearest(self.asked, below)
        return f"{where} has no module {self.asked!r}{near or f'; {has}'}"


class NoKeyError(MissingModuleError, KeyError):
    """Asked for with brackets, by name."""


class NoIndexError(MissingModuleError, IndexError):
    """Asked for with brackets, by index."""


class NoAttributeError(MissingModuleError, AttributeError):
    """Asked for as an attribute."""
