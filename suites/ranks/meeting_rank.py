"""One process of a meeting: `python meeting_rank.py RANK WORLD PORT`; says "here", and meets at each topic that it is told."""

from __future__ import annotations

import json
import sys

from pytest_fxbucket.ranks.torchrun.member import Member
from pytest_fxbucket.ranks.torchrun.rendezvous import Rendezvous

rank, world, port = map(int, sys.argv[1:])
meeting = Rendezvous(Member(rank, world, 0, 1, rank, world, "127.0.0.1", port, False, "suite/0"))
print("here", flush=True)
for line in sys.stdin:
    topic = line.strip()
    told = meeting.exchange(topic, rank, limit_s=60)
    print(json.dumps([sorted(told.entries), {str(one): why for one, why in told.missing.items()}]), flush=True)
