"""Names for the moments at which processes meet, in an order that tells who is ahead."""

from __future__ import annotations

HELLO, ITEMS, DIFFERENCES, END = "!hello", "#items", "#items.differences", "~end"
"""Before, and after, all that an Agenda names."""
LEFT = "~end.left"
"""Where a process is that will not even come to the end."""


class Agenda:
    """Where this process is in the list of items that all run. A later moment has a larger name, as strings go.

    A moment is: item, how often it was begun, phase, reports of the phase so far, 1 for a report or 0 for a run, run.
    """

    def __init__(self) -> None:
        self._item = self._begun = self._phase = self._reports = self._runs = 0

    def next_item(self) -> None:
        """Go on to the next item."""
        self._item += 1
        self._begun = self._phase = self._reports = self._runs = 0

    def enter(self, phase: int) -> None:
        """Go on to a phase of the item: 0 set-up, 1 call, 2 teardown; an earlier one than before begins the item again."""
        self._begun += phase <= self._phase and (self._reports > 0 or phase < self._phase)
        self._phase, self._reports, self._runs = phase, 0, 0

    def run(self) -> str:
        """The next job of ranks within this phase."""
        self._runs += 1
        return f"{self._prefix}.0.{self._runs:06d}"

    def report(self) -> str:
        """The next report about this phase."""
        topic = f"{self._prefix}.1"
        self._reports, self._runs = self._reports + 1, 0
        return topic

    @property
    def _prefix(self) -> str:
        return f"{self._item:08d}.{self._begun:03d}.{self._phase}.{self._reports:06d}"
