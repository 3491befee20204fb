"""The names of a model as selectors see them: modules, parameters, ties, and what a name holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


class Names:
    """An index of fully qualified names (FQNs): what each one holds, and what stands below it.

    ``what`` says for people what entries are to hold, in the plural.
    """

    def __init__(
        self, parameters: Sequence[str], modules: Sequence[str], aliases: Mapping[str, str], what: str = "parameters"
    ) -> None:
        self.what = what
        self.order = {fqn: place for place, fqn in enumerate(parameters)}
        self.modules = [fqn for fqn in modules if fqn]
        self._held: dict[str, dict[str, str]] = {}  # FQN -> {name below it: canonical FQN}
        self._children: dict[str, dict[str, None]] = {}  # module -> FQNs of its child modules, in order
        self._own: dict[str, list[str]] = {}  # module -> names of its own parameters, in order
        for fqn in self.modules:
            self._add_child(fqn)
        for fqn in parameters:
            self._add_parameter(fqn, fqn)
        for alias, fqn in aliases.items():
            self._add_parameter(alias, fqn)

    def held_by(self, selector: str) -> dict[str, str]:
        """Give the parameters that a name holds, as {name as spelled below it: canonical FQN}; empty if none.

        They are in the order of FSDP2's unit of that module (`torch.distributed.fsdp._fully_shard._fsdp_init`), which is that
        of its bytes: those of a module's children before its own.
        """
        held = self._held.get(selector, {})
        place = {name: number for number, name in enumerate(self._in_unit(selector))}
        return dict(sorted(held.items(), key=lambda one: place.get(one[0], -1)))

    def in_unit(self) -> list[str]:
        """Give canonical FQNs of all parameters, in the order of a unit that is the whole model."""
        return list(dict.fromkeys(self._held[name][name] for name in self._in_unit("")))

    def is_module(self, fqn: str) -> bool:
        """Tell whether a module of that name exists, with parameters or without."""
        return fqn in self._children

    def children(self, fqn: str) -> list[str]:
        """Give the FQNs of the child modules, in registration order; ``""`` is the model itself."""
        return list(self._children.get(fqn, {}))

    def known(self) -> list[str]:
        """Give every name that a selector could be: modules first, then parameters and their tied names."""
        modules = [fqn for fqn in self._children if fqn]
        return modules + [fqn for fqn in self._held if fqn not in self._children]

    def _in_unit(self, module: str) -> Iterator[str]:
        for child in self._children.get(module, {}):
            yield from self._in_unit(child)
        yield from self._own.get(module, ())

    def _add_child(self, fqn: str) -> None:
        self._children.setdefault(fqn, {})
        while fqn:
            parent = fqn.rpartition(".")[0]
            self._children.setdefault(parent, {})[fqn] = None
            fqn = parent

    def _add_parameter(self, spelled: str, canonical: str) -> None:
        parent = spelled.rpartition(".")[0]
        if parent and parent not in self._children:
            self._add_child(parent)
        self._own.setdefault(parent, []).append(spelled)
        name = spelled
        while name:
            self._held.setdefault(name, {})[spelled] = canonical
            name = name.rpartition(".")[0]
