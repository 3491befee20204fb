"""A model that ranks of this machine cannot build: each builds all of it before it takes its part."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import RankError
from pytest_fxbucket.ranks.room import available_memory

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import Parameter


def refuse_too_large(
    parameters: Sequence[Parameter], world: int, where: str, check: str = "bitwise", environ: Mapping[str, str] = os.environ
) -> None:
    """Raise :class:`RankError`, beginning with ``where``, if the ranks' models together exceed the memory that is free here.

    ``check`` is the one that needs them.
    """
    ranks = int(environ.get("LOCAL_WORLD_SIZE", world))  # of this machine, under torchrun
    needed = ranks * sum(prod(one.shape) * one.dtype.itemsize for one in parameters)
    if needed > (free := available_memory()):
        raise RankError(
            f"{where}: {ranks} ranks here would build {needed / 2**30:.1f} GiB of parameters, and {free / 2**30:.1f} GiB of "
            f"memory are free; run it on a smaller model in a row of [[matrix]] (model.args), or set checks.{check} = false"
        )
