"""Our replicas beside torchft's and plain DDP: a healthy step, a SIGKILL of a peer, a
silent one, a newcomer.

    python benchmarks/replica.py [--quick] [--parts healthy,kill,silent,rejoin]
                                 [--json FILE] [--plot FILE]

All train the same model on the same torch, in turns in one run. torchft 0.2.0 and its nightly of
2026-10-26 are installed on first use, each in an environment of its own outside the repository.
docs/replica-benchmark.md says what each column means. A full run takes some 40 minutes where
processors are slow; more rounds, turns and rejoins tell more. Of newcomers a full run has no time
for more than two of each; where they alone are asked for there are six, enough for an interval.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rivals import plot, report
from benchmarks.rivals.figures import ENOUGH
from benchmarks.rivals.results import PARTS, Plan, machine, measure
from benchmarks.rivals.task import State

#: The one of which all is trained is exchanged whole with each step; the others show what sending
#: costs.
STATES = (State(10.0), State(100.0, trained=True), State(400.0))
#: Newcomers of each contender and state: in a run that has other parts too, and in one of them
#: alone.
REJOINS, REJOINS_ALONE = 2, ENOUGH
LEAST = {"rounds": 2, "turns": 6}  # heavy gradients have a half and a third of them
QUICK = {
    "rounds": 4, "turns": 20, "kills": 8, "rival_kills": 4, "default_kills": 0,
    "stops": 2, "rival_stops": 1, "default_stops": 0, "rejoins": 1,
}  # fmt: skip


def main() -> None:
    options = arguments()
    kept = options.json is not None and options.json.exists()
    results = json.loads(options.json.read_text()) if kept else {}
    if options.parts:
        began = time.monotonic()
        plan = Plan(
            replicas=options.replicas,
            rounds=options.rounds,
            turns=options.turns,
            our_kills=options.kills,
            rival_kills=options.rival_kills,
            default_kills=options.default_kills,
            our_stops=options.stops,
            rival_stops=options.rival_stops,
            default_stops=options.default_stops,
            rejoins=options.rejoins,
            states=options.states,
        )

        def say(what: str) -> None:
            print(f"{time.monotonic() - began:5.0f} s  {what}", file=sys.stderr, flush=True)

        for part in options.parts:
            folder = Path(tempfile.mkdtemp(prefix=f"drydock-replica-{part}-"))
            say(f"part {part}; if it fails, see the logs in {folder}")
            machines = results.get("machines", {}) | {part: machine()}
            results |= {part: measure(plan, part, folder, say), "machines": machines}
            shutil.rmtree(folder)
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot is not None:
        options.plot.write_text(plot.svg(results))
    print("\n".join(report.lines(results)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", type=parts, default=PARTS, help="some of these; '' only tells what FILE holds"
    )
    parser.add_argument("--quick", action="store_true", help="a look, in a few minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="kept there, part by part")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="an SVG of all parts")
    parser.add_argument("--replicas", type=int, default=4, choices=[2, 3, 4, 6, 12])
    parser.add_argument("--rounds", type=int, default=6, help="turns of each in health")
    parser.add_argument(
        "--turns", type=int, default=60, help="of ours and plain DDP in the same processes"
    )
    parser.add_argument("--kills", type=int, default=100, help="of ours, for each traffic")
    parser.add_argument(
        "--rival-kills", type=int, default=20, help="a quarter as many of three replicas, ours too"
    )
    parser.add_argument("--default-kills", type=int, default=1, help="of rivals as they come")
    parser.add_argument("--stops", type=int, default=10, help="of ours, and as many black holes")
    parser.add_argument("--rival-stops", type=int, default=3)
    parser.add_argument("--default-stops", type=int, default=1, help="of rivals as they come")
    parser.add_argument(
        "--rejoins", type=int,
        help=f"of each, for each size of state; {REJOINS}, or {REJOINS_ALONE} if the parts are "
        "rejoin alone",
    )  # fmt: skip
    parser.add_argument(
        "--states", type=states, default=STATES, metavar="MB,...",
        help="that newcomers are given: MB, as good as none of it trained; 100t: all of it",
    )  # fmt: skip
    options = parser.parse_args()
    if options.quick:  # but for what is said beside it
        parser.set_defaults(**QUICK)
        options = parser.parse_args()
    if options.rejoins is None:
        options.rejoins = REJOINS_ALONE if options.parts == ("rejoin",) else REJOINS
    for name, least in LEAST.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}: give {least} or more")
    return options


def parts(text: str) -> tuple[str, ...]:
    wanted = tuple(part for part in text.split(",") if part)
    for part in wanted:
        if part not in PARTS:
            raise argparse.ArgumentTypeError(f"no part {part!r}; use some of {', '.join(PARTS)}")
    return wanted


def states(text: str) -> tuple[State, ...]:
    return tuple(State(float(one.removesuffix("t")), one.endswith("t")) for one in text.split(","))


if __name__ == "__main__":
    main()
