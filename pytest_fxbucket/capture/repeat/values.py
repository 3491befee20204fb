"""Fake tensors of repeated nodes: new ones, that share storages exactly as those of the nodes that they repeat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.fake_tensors import FakeTensor
from pytest_fxbucket.compat.storage import storage_key

if TYPE_CHECKING:
    from pytest_fxbucket.capture.repeat.template import Copy, Template


class Values:
    """Copies of the values of ``template``'s nodes for a graph of ``units`` units."""

    def __init__(self, template: Template, units: int) -> None:
        self.template, self.units = template, units
        self._owners: dict[int, tuple[int, int]] = {}
        for position, node in enumerate(template.nodes):
            for i, leaf in enumerate(_tensors(node.meta.get("val"))):
                self._owners.setdefault(storage_key(leaf), (position, i))
        self._storages: dict[tuple[Copy, int], torch.UntypedStorage] = {}

    def of(self, copy: Copy, value: Any) -> Any:
        """``value``, which the template's node holds, for ``copy`` of it. Called with dispatch modes off."""
        if isinstance(value, FakeTensor):
            return self._tensor(copy, value)
        if type(value) in (list, tuple):
            return type(value)(self.of(copy, item) for item in value)
        if isinstance(value, (list, tuple, dict)):
            return pytree.tree_map(lambda leaf: self._tensor(copy, leaf) if isinstance(leaf, FakeTensor) else leaf, value)
        return value

    def _tensor(self, copy: Copy, value: FakeTensor) -> FakeTensor:
        meta = torch.empty(0, dtype=value.dtype, device="meta")
        meta.set_(self._storage(copy, value), value.storage_offset(), value.shape, value.stride())
        made = FakeTensor(value.fake_mode, meta, value.device)
        made.requires_grad_(value.requires_grad)
        return made

    def _storage(self, copy: Copy, value: FakeTensor) -> torch.UntypedStorage:
        owner = self._owners.get(storage_key(value))
        key = (copy, -1) if owner is None else (self._owner(copy, owner[0]), owner[1])
        if key not in self._storages:
            size = value.untyped_storage().nbytes()
            self._storages[key] = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
        return self._storages[key]

    def _owner(self, copy: Copy, position: int) -> Copy:
        return copy if position == copy[0] else self.template.source(position, copy, self.units)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
