"""What a bucket is, as a class to build on: which launches belong together, in which order members lie, who packs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.passes.report import called
from pytest_fxbucket.words import show

if TYPE_CHECKING:
    from pytest_fxbucket.passes.packers import Packer
    from pytest_fxbucket.passes.targets import MergeTarget
    from pytest_fxbucket.plan.schema_bucket import Bucket


class Bucketer:
    """Decides buckets by the rules of a plan's ``[bucket]``. A subclass overrides any of its hooks.

    The pass makes one for each graph. It asks no hook for what an earlier run made a bucket, which stays as it is. What the
    answers leave open is as ever: members agree in direction, kind, process group, reduction, device, dtype and round, none
    needs another's result, and caps hold; the report says what parted them.
    """

    def __init__(self, rules: Bucket) -> None:
        self.rules = rules
        """The table ``[bucket]``."""

    def together(self, launch: MergeTarget) -> str:
        """A name: launches of one name share a bucket. It is the entry, unless a subclass says otherwise.

        Names within an entry part its buckets, which are needed together all the same. A name that launches of several entries
        have makes one entry of them, of that name. Anything but a str is a :class:`PlanError`.
        """
        return launch.entry

    def in_order(self, members: Sequence[MergeTarget]) -> Sequence[MergeTarget]:
        """``members``, given in order of launch, as they are to lie in their bucket; a part of them keeps the order.

        Must be the same on all ranks. Anything but each of ``members`` once is a :class:`PlanError`.
        """
        return sorted(members, key=lambda member: member.place) if self.rules.layout == "registration" else members

    def packer_of(self, members: Sequence[MergeTarget]) -> str | Packer:
        """Who packs the bucket of ``members``: a packer, or its name as ``[bucket] packer`` has it.

        Anything else is a :class:`PlanError`; of what a packer does wrong the pass raises :class:`PassError`.
        """
        return self.rules.packer


def name_of(bucketer: Bucketer, launch: MergeTarget) -> str:
    """What :meth:`Bucketer.together` says; raises :class:`PlanError` if that is no name."""
    name = bucketer.together(launch)
    if not isinstance(name, str):
        raise PlanError(f"{hook_name(bucketer, 'together')} must give a name (str) for {of(launch)}, not {show(name)}")
    return name


def laid_out(bucketer: Bucketer, members: tuple[MergeTarget, ...]) -> tuple[MergeTarget, ...]:
    """What :meth:`Bucketer.in_order` says; raises :class:`PlanError` if that is not each of ``members`` once."""
    said = bucketer.in_order(members)
    found = tuple(said) if isinstance(said, (list, tuple)) else ()
    if len(found) != len(members) or {id(member) for member in found} != {id(member) for member in members}:
        got = f"{len(found)} members" if isinstance(said, (list, tuple)) else show(said)
        raise PlanError(
            f"{hook_name(bucketer, 'in_order')} must give each of the {len(members)} members of the bucket of {of(members[0])} "
            f"once, in a list or tuple, and gave {got}"
        )
    return found


def packer_for(bucketer: Bucketer, members: tuple[MergeTarget, ...]) -> str | Packer:
    """What :meth:`Bucketer.packer_of` says; raises :class:`PlanError` if that is no packer."""
    packer = bucketer.packer_of(members)
    if isinstance(packer, str) or callable(packer):
        return packer
    raise PlanError(
        f"{hook_name(bucketer, 'packer_of')} must give a packer or its name for {of(members[0])}, not {show(packer)}"
    )


def hook_name(owner: object, hook: str) -> str:
    """A hook, as people know it."""
    return f"{type(owner).__name__}.{hook}"


def of(launch: MergeTarget) -> str:
    """A launch, as people know it."""
    return f"the {launch.kind} of {called(launch)} ({launch.direction})"
