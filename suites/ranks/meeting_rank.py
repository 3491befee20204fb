"""One process of a meeting: `python meeting_rank.py RANK WORLD PORT`; meets, and stays."""

from __future__ import annotations

import signal
import sys

from pytest_fxbucket.ranks.torchrun.member import Member
from pytest_fxbucket.ranks.torchrun.rendezvous import Rendezvous

rank, world, port = map(int, sys.argv[1:])
meeting = Rendezvous(Member(rank, world, 0, 1, rank, world, "127.0.0.1", port, False, "suite/0"))
signal.pause()
