"""Many schedules by hand, or one aloud: `python -m tests.runtime.simulation FIRST COUNT`."""

from __future__ import annotations

import argparse
import sys
import time

from tests.runtime.simulation.schedule import Failed, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.runtime.simulation", description=__doc__)
    parser.add_argument("first", type=int, nargs="?", default=0, help="the first seed")
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--lines", type=int, default=300, help="of the first failure's trace")
    given = parser.parse_args()
    began = time.monotonic()
    outcomes = []
    failed: list[int] = []
    for seed in range(given.first, given.first + given.count):
        try:
            outcomes.append(run(seed, lines=0 if failed else given.lines))
        except Failed as error:
            failed.append(seed)
            sys.stdout.write(f"{error}\n")
    sys.stdout.write(
        f"{given.count} schedules in {time.monotonic() - began:.1f} s, failed {failed}; "
        f"{sum(o.steps for o in outcomes)} steps, {sum(o.epochs for o in outcomes)} epochs, "
        f"{sum(o.strays for o in outcomes)} strays, slowest recovery "
        f"{max((o.recovery_s for o in outcomes), default=0):.1f} s\n"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
