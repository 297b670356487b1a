"""`python -m runtime.torture`: break a job at random and at named phases, then judge it.

Exit status 0 only if every claim held. Leaves no process behind, whatever happens to itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from runtime.checkpoint import compression
from runtime.checkpoint.objects import ObjectStore
from runtime.torture import ending
from runtime.torture.faults import Fault, Settings, each, phases_of, plan
from runtime.torture.kinds import KINDS, MOMENTS, OF_NETWORK, PACK, TO_OBJECTS
from runtime.torture.launch import JOB, STATE, Fleet, Script
from runtime.torture.ledger import counted
from runtime.torture.measure import Figures, measure, median_step
from runtime.torture.network import MAX_REPLICAS, NoNetwork, impossible
from runtime.torture.report import HEADING, Report, Seen, judge, line, text
from runtime.torture.run import PATIENCE_S, Hung, Run
from runtime.torture.storage import SAVES_S

LEAST = {"faults": 0, "steps": 0, "ranks": 1, "at_once": 1, "minutes": 0, "pace": 0}
MODES = ("reproducible", "cover", "drop")
DEFAULT_FAULTS = 10
#: What ends a run: what was waited for did not come, or a coordinator or holder did not answer.
GIVEN_UP = (Hung, OSError)
FILE = "file://"
DUMP_S = 1.0  # how long hung ranks have to write their stacks down


def main() -> None:
    """Run the torture and print the report; exit status 0: all held, 1: not, 2: it cannot run."""
    ending.listen()
    options = parse(sys.argv[1:])
    # As writers' open files tell it, which know no links.
    folder = Path(tempfile.mkdtemp(prefix="drydock-torture-")).resolve()
    try:
        report = torture(options, folder)
        ending.heed()
    except NoNetwork as error:
        clear(folder, options)
        sys.stderr.write(f"{error}; --network shared does without\n")
        sys.exit(2)
    except SystemExit:  # told to end: by now no process is left
        clear(folder, options)
        raise
    if report.ok and not options.keep:
        clear(folder, options)
    else:
        report = replace(report, folder=str(folder))
    sys.stdout.write((json.dumps(asdict(report)) if options.json else text(report)) + "\n")
    sys.exit(0 if report.ok else 1)


def clear(folder: Path, options: argparse.Namespace) -> None:
    """Remove all that the run has left: its folder, its disk's and its objects."""
    shutil.rmtree(folder)
    if options.disk is not None:
        shutil.rmtree(options.disk / STATE, ignore_errors=True)
    if options.objects:
        shutil.rmtree(of_job(options.objects), ignore_errors=True)


def torture(options: argparse.Namespace, folder: Path) -> Report:
    """Both runs, one after the other so that neither slows the other, and the judgement."""
    script = Script(options.script, tuple(options.arguments), options.options, options.mode)
    with Fleet(
        folder / "disturbed",
        script,
        options.replicas,
        options.pace,
        options.ranks,
        SAVES_S if options.settings.stores else 0.0,
        options.disk,
        options.objects,
        networked=options.settings.network,
    ) as fleet:
        run = Run(fleet, options.patience)
        figures = disturbed(run, options)
        broken = seen(run)
    alone = None
    if run.steps is not None:
        say(options, f"\nthe same {run.steps} steps undisturbed")
        with Fleet(folder / "undisturbed", script, options.replicas, ranks=options.ranks) as fleet:
            quiet = Run(fleet, options.patience)
            undisturbed(quiet, run.steps)
            alone = seen(quiet)
    return judge(
        broken,
        alone,
        figures,
        mode=options.mode,
        seed=options.settings.seed,
        replicas=options.replicas,
    )


def disturbed(run: Run, options: argparse.Namespace) -> list[Figures]:
    """Break it as often as asked, then let it end in peace."""
    settings: Settings = options.settings
    say(options, f"seed {settings.seed}, {settings.replicas} replicas, {options.mode}\n\n{HEADING}")
    faults: Iterable[Fault] = plan(settings)
    if options.each:
        faults = each(settings)
    elif not options.minutes:
        faults = itertools.islice(faults, options.faults)
    try:
        run.start()
        recover(run, options)
        enough_at = time.monotonic() + options.minutes * 60  # of faults: a start may take long
        for fault in faults:
            if not fault.hasty:
                recover(run, options)
            if options.minutes and time.monotonic() > enough_at:
                break
            run.disturb(fault)
        if options.minutes and not run.made:
            run.problems.append("no fault was made: give it more --minutes")
        recover(run, options)
        run.settle_soon(options.steps)
        run.finish()
    except GIVEN_UP as error:
        give_up(run, error)
    return [figures_of(run, place) for place in range(len(run.made))]


def recover(run: Run, options: argparse.Namespace) -> None:
    """Wait until all replicas train together again, and say what each fault since cost."""
    for place in run.recover():
        say(options, line(figures_of(run, place)))


def undisturbed(run: Run, steps: int) -> None:
    """Run a job of so many steps to its end without any fault.

    What it waits for in vain is noted among the run's problems; nothing is raised for it.
    """
    try:
        run.settle(steps)
        run.start()
        run.finish()
    except GIVEN_UP as error:
        give_up(run, error)


def give_up(run: Run, error: Exception) -> None:
    """Note what was waited for, and have the ranks write down where they stand."""
    run.problems.append(f"{str(error) or repr(error)}; the logs tell where each replica stood")
    run.fleet.dump_stacks()
    time.sleep(DUMP_S)
    run.watch.poll()


def figures_of(run: Run, place: int) -> Figures:
    """Return the figures of the fault at this place of `run.made`."""
    started = {rank.placement: rank.started for rank in run.fleet.started}
    made = run.made[place]
    others = [other for other in run.made if other is not made]
    overlapping = [other for other in others if other.back_at == made.back_at]
    return measure(made, run.watch, started, overlapping)


def seen(run: Run) -> Seen:
    """Return what the run left behind, for `judge`."""
    restarts = [made.restart for made in run.made if made.restart is not None]
    return Seen(
        events=counted(run.watch.events, restarts),
        restarts=restarts,
        present=[rank.placement for rank in run.fleet.ranks.values()],
        steps=run.steps,
        deaths=run.deaths,
        problems=run.problems,
        step_s=median_step(run.watch),
    )


def say(options: argparse.Namespace, told: str) -> None:
    """To a person who waits; the object of --json stands alone on its stream."""
    stream = sys.stderr if options.json else sys.stdout
    stream.write(told + "\n")
    stream.flush()


def parser_of_options() -> argparse.ArgumentParser:
    """Return the parser of the command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m runtime.torture",
        description="Break a training job at random and at named phases, then judge it.",
        epilog="kinds: "
        + "; ".join(
            f"{kind.name}: {kind.meaning}" + (f" ({', '.join(kind.phases)})" if kind.stores else "")
            for kind in KINDS.values()
        ),
    )
    add = parser.add_argument
    add("--script", type=Path, default=Path(__file__).with_name("script.py"), help="what to train")
    add(
        "--options",
        type=object_of,
        default={},
        help="a JSON object for the script's DRYDOCK_OPTIONS",
    )
    add("--replicas", type=int, default=4)
    add("--ranks", type=int, default=1, help="of each replica; the script divides its model")
    add("--steps", type=int, default=0, help="the run has at least so many, more if faults need it")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--faults", type=int, default=DEFAULT_FAULTS, help="how many to make")
    length.add_argument(
        "--each", action="store_true", help="make every kind of fault once in each phase"
    )
    length.add_argument("--minutes", type=float, default=0.0, help="make faults for so long")
    add("--kinds", type=names_of(tuple(KINDS)), help="with commas between; all of them if not said")
    add("--phases", type=names_of(MOMENTS), help=", ".join(MOMENTS))
    add(
        "--network",
        choices=("own", "shared"),
        help="own: each replica has a machine of its own, as far as packets can tell, which root "
        "can make; own where that can be and a fault is of the network, if not said",
    )
    add("--mode", choices=MODES, default=MODES[0])
    add("--seed", type=int, default=None, help="of the plan; told at the end if not given")
    add("--at-once", type=int, default=2, help="replicas struck at once, at most")
    add("--pace", type=float, default=0.0, help="seconds that a shard takes besides, while broken")
    add("--disk", type=Path, help="where the shared folder is; a file system of its own is filled")
    add(
        "--objects",
        default="",
        help=f"file:// URL of a folder that is the job's object store; for {', '.join(TO_OBJECTS)}",
    )
    add("--patience", type=float, default=PATIENCE_S, help="seconds for each wait")
    add("--keep", action="store_true", help="keep the logs though all is well")
    add("--json", action="store_true", help="one object on standard output, and nothing else there")
    add("arguments", nargs="*", help="after --: given to the script")
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options, with the settings of the plan in `settings`; ends where they make no sense."""
    parser = parser_of_options()
    options = parser.parse_args(words)
    if not options.script.is_file():
        parser.error(f"there is no script {options.script}")
    for name, least in LEAST.items():
        if not least <= getattr(options, name) < math.inf:
            parser.error(
                f"--{name.replace('_', '-')} is {getattr(options, name)}: give {least} or more"
            )
    if not 0 < options.patience < math.inf:
        parser.error(f"--patience is {options.patience}: give seconds, more than 0")
    if options.disk is not None:
        options.disk = options.disk.resolve()
        if options.disk.exists() and not options.disk.is_dir():
            parser.error(f"--disk {options.disk} is no folder: give one, or a mounted file system")
        if (options.disk / STATE).exists():
            parser.error(
                f"{options.disk / STATE} exists, and of what is there nothing is to be damaged: "
                "give another --disk, or remove it if a run left it"
            )
    if options.objects and (flaw := flaw_of_objects(options.objects)):
        parser.error(f"--objects {options.objects}: {flaw}")
    lacking = lacks(options.objects)
    if options.phases is None:
        options.phases = tuple(phase for phase in MOMENTS if phase not in lacking)
    if odd := lacking.keys() & set(options.phases):
        parser.error("; ".join(f"--phases {phase}: {lacking[phase]}" for phase in sorted(odd)))
    why = impossible() if options.network != "shared" else "--network shared"
    if options.network == "own" and why:
        parser.error(f"--network own: {why}")
    if options.kinds is None:  # then those that are possible
        options.kinds = tuple(
            kind.name
            for kind in KINDS.values()
            if (options.ranks == 1 or kind.name != "cut")
            and not (kind.networked and why)
            and phases_of(kind, options.replicas, options.phases)
        )
        if not options.kinds:
            parser.error(
                f"nothing can strike {options.replicas} replicas in {', '.join(options.phases)}: "
                "give more --replicas, for one must survive, or other --phases"
            )
    of_network = not why and any(kind in OF_NETWORK for kind in options.kinds)
    if (options.network == "own" or of_network) and options.replicas > MAX_REPLICAS:
        parser.error(
            f"--replicas is {options.replicas}: a network of the run's own has room for "
            f"{MAX_REPLICAS}; give no more, or --network shared"
        )
    if why and any(KINDS[kind].networked for kind in options.kinds):
        parser.error(f"a network of the run's own cannot be had: {why}; give other --kinds")
    try:
        options.settings = Settings(
            seed=secrets.randbelow(1 << 31) if options.seed is None else options.seed,
            replicas=options.replicas,
            kinds=options.kinds,
            phases=options.phases,
            at_once=options.at_once,
            ranks=options.ranks,
            network=options.network == "own" or of_network,
        )
    except ValueError as error:
        parser.error(str(error))
    return options


def flaw_of_objects(url: str) -> str:
    """Why this cannot be the object store of a run; "" if it can."""
    if not url.startswith(FILE + "/"):
        return f"give a folder's, {FILE}/...: what is saved there is damaged and removed"
    if of_job(url).exists():
        return f"{of_job(url)} exists: give another folder, or remove it if a run left it"
    try:
        ObjectStore(url, JOB)
    except (ImportError, ValueError) as error:
        return f"{error}: install fsspec"
    return ""


def of_job(url: str) -> Path:
    """What a run puts into this store."""
    return Path(url.removeprefix(FILE)) / JOB


def lacks(objects: str) -> dict[str, str]:
    """The phases that cannot be come to here, and what they need."""
    found = {} if objects else dict.fromkeys(TO_OBJECTS, "give the job an object store, --objects")
    return found if compression.is_installed() else {**found, PACK: compression.INSTALL}


def object_of(given: str) -> dict[str, Any]:
    """Parses a JSON object."""
    try:
        found = json.loads(given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{given!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{given!r} is no JSON object: give {{...}}")
    return found


def names_of(known: tuple[str, ...]) -> Any:
    """Parses names with commas between them, and refuses what is not known."""

    def names(given: str) -> tuple[str, ...]:
        found = tuple(given.split(","))
        if unknown := set(found) - set(known):
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(sorted(unknown))}; choose of {', '.join(known)}"
            )
        return found

    return names


if __name__ == "__main__":
    main()
