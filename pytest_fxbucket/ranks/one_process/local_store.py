"""The store of a process that plays several ranks: who waits for a key lets the others go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_fxbucket.compat import c10d
from pytest_fxbucket.ranks.one_process.baton import Baton


class LocalStore(c10d.Store):
    """Keys and values in this process's memory; waiting raises Stuck when no rank can go on. There is no time to run out."""

    def __init__(self, baton: Baton) -> None:
        super().__init__()
        self._baton = baton
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of `key`."""
        self._values[key] = _as_bytes(value)

    def get(self, key: str) -> bytes:
        """The value of `key`, once there is one."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        """Add to the number at `key`, which begins with 0; the sum."""
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` are there; who asks in a loop lets the others go on."""
        if not self._has(keys):
            self._baton.pause(self._baton.holder)
        return self._has(keys)

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """Return once all `keys` are there."""
        self._baton.wait_until(self._baton.holder, lambda: self._has(keys))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set `key` if its value is the expected one, or if there is none and none is expected; its value then."""
        value = self._values.get(key, b"")
        if value == _as_bytes(expected_value):
            value = self._values[key] = _as_bytes(desired_value)
        return value or _as_bytes(expected_value)

    def delete_key(self, key: str) -> bool:
        """Remove `key`; whether it was there."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many keys there are."""
        return len(self._values)

    # What PrefixStore calls them.
    compareSet = compare_set
    deleteKey = delete_key
    getNumKeys = num_keys

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
