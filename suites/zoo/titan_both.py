"""``python -m suites.zoo.titan_both``: torchtitan's trainer as it is eager's, then as it is captured, a line for each case.

In one process and on one server of ranks, since the libraries take longest to import.
"""

from __future__ import annotations

import sys
import traceback

from pytest_fxbucket.ranks.pools import Pools
from suites.zoo import titan_captured, titan_trainer


def main() -> None:
    """Print them below the name of the module that has the cases; one that breaks off leaves the other its lines."""
    pools = Pools(warm=["suites.zoo.titan_warm"])
    try:
        for module in (titan_trainer, titan_captured):
            print(f"# {module.__name__}")
            try:
                for line in module.lines(pools):
                    print(line)
            except Exception:
                traceback.print_exc()
    finally:
        pools.close()


if __name__ == "__main__":
    sys.exit(main())
