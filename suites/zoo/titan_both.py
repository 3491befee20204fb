"""``python -m suites.zoo.titan_both``: torchtitan's trainer as eager's, then trainers as they are captured, a line a case.

In one process and on one server of ranks, since the libraries take longest to import.
"""

from __future__ import annotations

import sys
import traceback

from pytest_fxbucket.ranks.pools import Pools
from suites.zoo import titan_captured, titan_trainer


def main() -> int:
    """Print them below the name of the module that has the cases; one that breaks off leaves the other its lines."""
    pools, status = Pools(warm=["suites.zoo.titan_warm"]), 0
    try:
        for module in (titan_trainer, titan_captured):
            print(f"# {module.__name__}")
            try:
                for line in module.lines(pools):
                    print(line)
            except Exception:  # whatever it is: the other part is another test's
                traceback.print_exc(file=sys.stdout)
                status = 1
    finally:
        pools.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
