"""Names of nodes in a longer trace: texts that stay, and numbers that grow by the same with each unit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from pytest_fxbucket.capture.repeat.errors import NotAlike

Numbers: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Name:
    """``view_12`` as text and numbers; a name without a number at its end has the number 0 there, as FX counts."""

    texts: tuple[str, ...]
    numbers: Numbers

    @classmethod
    def of(cls, text: str) -> Name:
        """Taken apart."""
        parts = re.split(r"(\d+)", text if re.search(r"_\d+$", text) else f"{text}_0")
        return cls(tuple(parts[::2]), tuple(map(int, parts[1::2])))

    def growth(self, other: Name) -> Numbers:
        """By how much the numbers of ``other`` are larger. Raises :class:`NotAlike` if the texts differ."""
        if self.texts != other.texts:
            raise NotAlike(f"the nodes {self} and {other} have the same place in their layers")
        return tuple(b - a for a, b in zip(self.numbers, other.numbers, strict=True))

    def grown(self, growth: Numbers, times: int) -> Name:
        """With numbers larger by ``growth``, ``times`` times."""
        return Name(self.texts, tuple(number + times * g for number, g in zip(self.numbers, growth, strict=True)))

    def __str__(self) -> str:
        text = "".join(f"{text}{number}" for text, number in zip(self.texts, self.numbers, strict=False)) + self.texts[-1]
        return text.removesuffix("_0")
