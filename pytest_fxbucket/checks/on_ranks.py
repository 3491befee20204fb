"""A check of one plan that runs functions on its ranks: what every such check is given, and how it asks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fxbucket.artifacts import Folder
    from pytest_fxbucket.ranks.backend import Choice
    from pytest_fxbucket.ranks.pools import Pools
    from pytest_fxbucket.world import World


@dataclass(frozen=True)
class OnRanks:
    """A plan and the ranks that it runs on."""

    world: World
    name: str
    """Of the plan, for people."""
    choice: Choice
    """What its ranks run on, and how it came to that."""
    pools: Pools
    paths: Sequence[Path]
    """Folders that are first on the path in the ranks."""
    folder: Folder
    say: Callable[[str], None]

    @property
    def backend(self) -> str:
        """What its ranks run on; a check that cannot run has none, and is not made."""
        return self.choice.backend or ""

    @property
    def over(self) -> str:
        """The back end, and what kept it from GPUs, for people."""
        return f"{self.backend} ({self.choice.lacking})" if self.choice.lacking else self.backend

    def ask(self, job: str, tasks: Sequence[object], check: str) -> list[Any]:
        """What ``job`` (``module:function``) gives for each rank's task. Raises RankError and RankFailure as a pool's run."""
        return self.pools.get(self.world.size, self.backend).run(
            job,
            tasks,
            timeout_s=self.world.plan.run.timeout_s,
            paths=[str(path) for path in self.paths],
            log_dir=self.folder.make(),
            what=f"{check} of {self.name}",
        )
