"""What of a process's state a rank may take for its own, to be changed when the process goes on as another rank.

Thread-local state (grad mode, autocast, the default device) needs no change, since each rank has a thread. Modules, and what
they keep in their globals, are shared.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_fxbucket.compat.threads import Groups, put_groups, take_groups
from pytest_fxbucket.process_state import ProcessState


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Process groups, and what all threads of a process share."""

    groups: Groups
    state: ProcessState

    @classmethod
    def take(cls) -> Surroundings:
        """Those of this process as they are now."""
        return cls(take_groups(), ProcessState.take())

    def put_back(self) -> None:
        """Let the process have these again."""
        put_groups(self.groups)
        self.state.put_back()
