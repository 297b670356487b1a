"""Looks at checkpoints, and takes them to and from other tools.

    python -m runtime.checkpoint ls|inspect|verify|prune PATH
    python -m runtime.checkpoint diff LEFT RIGHT
    python -m runtime.checkpoint export PATH OUT --to torch|safetensors|dcp
    python -m runtime.checkpoint import SOURCE STATE_DIR

A PATH is a checkpoint, a folder of them, or a job's state folder; of `ls` and `verify` also the URL
of a job in an object store, as s3://bucket/prefix/JOB, and a node's holder, which keeps peers'
states in memory: its folder there, or holder://HOST:PORT, with the job's token in DRYDOCK_TOKEN. Of
several the newest is meant, where one is, but none that led to NaN. Exit status: 0 if all is well,
1 if something is damaged or differs, 2 if it cannot be done, or one of several could not be checked
here, 130 if it was interrupted. What looks and removes needs no torch.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from runtime.checkpoint import in_memory, store
from runtime.checkpoint.compression import NotInstalled
from runtime.checkpoint.facts import saved_when
from runtime.checkpoint.manifest import Manifest, OtherVersion, shown
from runtime.checkpoint.progress import Bar
from runtime.checkpoint.suspects import FILE, State, suspects
from runtime.checkpoint.tiers import KEEP_LOCAL
from runtime.image import Damaged

if TYPE_CHECKING:
    from runtime.checkpoint.objects import Found, ObjectStore

NOT_WELL, CANNOT, INTERRUPTED = 1, 2, 130
#: What reading something that only looks like a checkpoint may come to.
MALFORMED = (
    LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, RuntimeError,
    UnicodeError,
)  # fmt: skip
DAY_S = 86_400.0
#: One line for a person, beside the object for a program.
Answer = tuple[dict[str, Any], list[str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    asked = _asked(arguments)
    try:
        answers = list(VERBS[asked.verb](asked))
        said = _in_words(answers) if not asked.json else _as_json(answers)
    except (Damaged, OSError, ValueError) as error:
        return _cannot(asked, str(error))
    except MemoryError as error:
        words = f"{asked.verb} needs more memory than is left here: take a machine with more"
        return _cannot(asked, str(error) or words)
    except ImportError as error:
        return _cannot(asked, f"{asked.verb} needs a package that is missing here: {error}")
    except KeyboardInterrupt:
        return _cannot(asked, "interrupted", INTERRUPTED)
    except MALFORMED as error:
        where = getattr(asked, "path", None) or getattr(asked, "source", None) or asked.left
        return _cannot(asked, f"{where} holds what no checkpoint does: {shown(error)}")
    print(said)  # noqa: T201
    if any(answer.get("findings") for answer, _lines in answers):
        return NOT_WELL
    return CANNOT if any(answer.get("not_checked") for answer, _lines in answers) else 0


def _cannot(asked: argparse.Namespace, why: str, status: int = CANNOT) -> int:
    print(_printable(" ".join(why.split())), file=sys.stderr)  # noqa: T201
    if asked.json:
        print(json.dumps([{"error": why}]))  # noqa: T201
    return status


def _in_words(answers: Sequence[Answer]) -> str:
    return "\n".join(_printable(line) for _answer, lines in answers for line in lines)


def _as_json(answers: Sequence[Answer]) -> str:
    return json.dumps([_in_json(answer) for answer, _lines in answers])


def _printable(line: str) -> str:
    """Names and facts are anybody's: none of them moves the cursor or makes a line of its own."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line)


def _in_json(value: Any) -> Any:
    """JSON has no word for what is no finite number."""
    if isinstance(value, dict):
        return {str(key): _in_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# --- looking --------------------------------------------------------------------------------------


def ls(asked: argparse.Namespace) -> list[Answer]:
    """What each one's manifest says."""
    if (holder := in_memory.address_of(asked.path)) is not None:
        return [*in_memory.listed(holder)]
    if isinstance(asked.path, str):
        answers = _in_store(asked.path, lambda _objects, _found: ([], ""), well="")
        _say_untold(asked.path)
        return answers
    paths = store.found_in(asked.path)
    known = _suspects(paths)
    return [_listed(path, known) for path in paths]


def _listed(path: Path, known: Collection[State]) -> Answer:
    try:
        manifest = store.manifest_of(path)
    except Damaged as error:
        if _is_gone(path):
            return _removed(path)
        return _not_read(path, error), [f"{path.name:<16} {error}"]
    leads_to_nan = (store.epoch_of(manifest), manifest.step) in known
    answer = {
        "path": str(path), **_described(manifest), "leads_to_nan": leads_to_nan, "findings": [],
    }  # fmt: skip
    nan = "  led to NaN" if leads_to_nan else ""
    return answer, [f"{path.name:<16} {_in_a_line(manifest)}{nan}"]


def _described(manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step, **_sizes(manifest), "ranks": len(manifest.parts),
        "digest": manifest.digest, "facts": manifest.facts,
    }  # fmt: skip


def _in_a_line(manifest: Manifest) -> str:
    size = f"{manifest.size:>15,} bytes{_packed(manifest)}"
    return f"{saved_when(manifest.facts)}  {size}  {len(manifest.parts)} ranks  {manifest.digest}"


def _in_store(
    url: str, look: Callable[[ObjectStore, Found], tuple[list[str], str]], *, well: str
) -> list[Answer]:
    """Of each one in an object store what it is, and what a closer look finds, or why there was
    none. `well`: the word for one in which nothing is found."""
    from runtime.checkpoint.objects import found_at

    objects, there = found_at(url)
    answers: list[Answer] = []
    for one in there:
        if isinstance(one, Damaged):
            answers.append((_not_read(url, one), [str(one)]))
            continue
        path = objects.url_of(one)
        findings, not_checked = look(objects, one)
        word = "DAMAGED" if findings else "NOT CHECKED" if not_checked else well
        why = [f"  {flaw}" for flaw in findings or [not_checked] if flaw]
        answer = {
            "path": path, **_described(one.manifest), "findings": findings,
            "not_checked": not_checked,
        }  # fmt: skip
        line = f"{path.rpartition('/')[2]:<24} {_in_a_line(one.manifest)}"
        answers.append((answer, [f"{line}  {word}".rstrip(), *why]))
    return answers


def _verified_there(
    asked: argparse.Namespace, objects: ObjectStore, found: Found
) -> tuple[list[str], str]:
    with _bar(asked, found.path.rpartition("/")[2], found.manifest.size) as bar:
        try:
            return objects.verify(found, bar), ""
        except (NotInstalled, OSError) as error:
            return [], str(error)


def inspect(asked: argparse.Namespace) -> list[Answer]:
    """What is in the newest one, tensor by tensor."""
    path = _newest(asked.path)
    try:
        manifest = store.manifest_of(path)
        parts = [store.part_of(path, manifest, one.rank) for one in manifest.parts]
    except Damaged as error:
        if _is_gone(path):
            return [_removed(path)]
        return [(_not_read(path, error), [str(error)])]
    tensors = [{"rank": part.rank, **vars(piece)} for part in parts for piece in part.table.pieces]
    answer = {
        "path": str(path), "step": manifest.step, **_sizes(manifest), "digest": manifest.digest,
        "facts": manifest.facts, "tensors": tensors, "findings": [],
    }  # fmt: skip
    lines = [f"step {manifest.step}, saved {saved_when(manifest.facts)}, digest {manifest.digest}"]
    lines += [f"{manifest.size:,} bytes{_packed(manifest)}"]
    lines += [f"{name}: {value}" for name, value in manifest.facts.items()]
    lines += [
        f"rank {one['rank']}  {one['bytes']:>13,} bytes  {one['dtype']:<9} "
        f"{'x'.join(map(str, one['shape'])) or 'scalar':<14} {one['name'].removeprefix('.')}"
        for one in tensors
    ]
    return [(answer, lines)]


def _newest(path: Path) -> Path:
    """The checkpoint that a path means: itself, or of several the latest training that is not known
    to lead to NaN. Raises Damaged if there is none."""
    paths = store.found_in(path)
    if paths == [path]:
        return path
    known = _suspects(paths)
    trains = next((one for one in paths if _state_of(one) not in known), None)
    if trains is None:
        raise Damaged(
            f"each of the {len(paths)} checkpoints in {path} led to NaN soon after it was loaded; "
            f"to take one all the same give its own folder, as {paths[0]}"
        )
    return trains


def _not_read(path: Path | str, error: Damaged) -> dict[str, Any]:
    """Of one that is damaged; or that nobody can tell here."""
    if isinstance(error, store.NOT_JUDGED):
        return {"path": str(path), "findings": [], "not_checked": str(error)}
    return {"path": str(path), "findings": [str(error)]}


def _sizes(manifest: Manifest) -> dict[str, Any]:
    """Bytes of the state, those in its files, and how many of these for one of those."""
    return {
        "bytes": manifest.size,
        "stored": manifest.stored,
        "ratio": round(manifest.stored / manifest.size, 4) if manifest.size else 1.0,
    }


def _packed(manifest: Manifest) -> str:
    """For a person, if it is."""
    sizes = _sizes(manifest)
    if sizes["stored"] == sizes["bytes"]:
        return ""
    return f", packed to {sizes['stored']:,} ({sizes['ratio']:.0%})"


def verify(asked: argparse.Namespace) -> list[Answer]:
    """Read every byte of each. What is packed, and nothing here unpacks, hides no other."""
    if (holder := in_memory.address_of(asked.path)) is not None:
        return [*in_memory.listed(holder, partial(_bar, asked))]
    if isinstance(asked.path, str):
        return _in_store(asked.path, partial(_verified_there, asked), well="well")
    return [_looked_into(asked, path) for path in store.found_in(asked.path)]


def _looked_into(asked: argparse.Namespace, path: Path) -> Answer:
    found: list[store.Finding] = []
    not_checked = ""
    try:
        found = _verified(asked, path)
    except NotInstalled as error:
        not_checked = str(error)
    if found and _is_gone(path):
        return _removed(path)
    findings = [str(finding) for finding in found]
    if _is_not_judged(found):
        findings, not_checked = [], "; ".join(findings)
    word = "DAMAGED" if findings else "NOT CHECKED" if not_checked else "well"
    why = [f"  {one}" for one in findings or [not_checked] if one]
    answer = {"path": str(path), "findings": findings, "not_checked": not_checked}
    return answer, [f"{path.name:<16} {word}", *why]


def _is_not_judged(findings: Sequence[store.Finding]) -> bool:
    """Whether it may be whole, for all that is known."""
    return bool(findings) and all(finding.not_judged for finding in findings)


def _is_gone(path: Path) -> bool:
    """Whether it was removed since we began: a job that trains keeps the newest alone."""
    return not os.path.lexists(path)


def _removed(path: Path) -> Answer:
    answer = {"path": str(path), "findings": [], "removed": True}
    return answer, [f"{path.name:<16} removed meanwhile"]


@contextmanager
def _told_if_removed(path: Path) -> Iterator[None]:
    """Raises Damaged that says so, for what it then lacks is no damage."""
    try:
        yield
    except (Damaged, FileNotFoundError) as error:
        if not _is_gone(path):
            raise
        raise Damaged(
            f"{path} was removed while it was read, as a job that trains removes its older ones: "
            "run it again, or copy it first"
        ) from error


def _verified(asked: argparse.Namespace, path: Path) -> list[store.Finding]:
    with _bar(asked, path.name, size_of(path)) as bar:
        return store.verify(path, bar)


def diff(asked: argparse.Namespace) -> list[Answer]:
    """What is not the same in two."""
    from runtime.checkpoint.difference import differences, unchanged
    from runtime.checkpoint.interchange import comparable_state

    paths = [_newest(asked.left), _newest(asked.right)]
    states = []
    for path in paths:
        with _told_if_removed(path), _bar(asked, path.name, size_of(path)) as bar:
            states.append(comparable_state(path, bar))
    found = list(differences(*states))
    same = unchanged(*states)
    answer = {
        "left": str(paths[0]), "right": str(paths[1]), "unchanged": same,
        "findings": [one.describe() for one in found],
    }  # fmt: skip
    lines = [str(one) for one in found] or ["no difference: the same to the last bit"]
    if found and same:
        lines.append(f"unchanged weights: {store.shortened(tuple(same), 20)}")
    return [(answer, lines)]


# --- to and from others ---------------------------------------------------------------------------


def export(asked: argparse.Namespace) -> list[Answer]:
    """Write the newest one as another tool reads it."""
    from runtime.checkpoint.interchange import EXPORTS, demand, left_out, size_as, whole_state

    path = _newest(asked.path)
    if Path(os.path.realpath(path)) in Path(os.path.realpath(asked.out)).parents:
        raise Damaged(f"{asked.out} is in the checkpoint itself: give a place outside {path}")
    demand(asked.to, asked.out)
    with _told_if_removed(path), _bar(asked, path.name, size_of(path)) as bar:
        state = whole_state(path, bar)
    with _bar(asked, asked.out.name, size_as(asked.to, state)) as bar:
        EXPORTS[asked.to](state, asked.out, bar)
    lines = [f"{path.name} is in {asked.out} ({asked.to})"]
    if names := left_out(asked.to, state):
        lines.append(
            f"without {store.shortened(names)}, which {asked.to} cannot keep: it holds no tensor"
        )
    answer = {"path": str(path), "out": str(asked.out), "to": asked.to, "left_out": names}
    return [(answer, lines)]


def import_(asked: argparse.Namespace) -> list[Answer]:
    """Make what another tool wrote the beginning of a new job."""
    from runtime.checkpoint import interchange

    interchange.demand_new(asked.state_dir)
    with _bar(asked, asked.source.name, interchange.size_to_read(asked.source)) as bar:
        state = interchange.foreign_state(asked.source, bar)
    size = 3 * interchange.size_of(state["model"])  # it is copied, written, and read back
    with _bar(asked, asked.state_dir.name, size) as bar:
        path = interchange.import_into(asked.state_dir, state, asked.source, asked.strip, bar)
    tensors = len([*interchange.tensors_in(state["model"])])
    names = tuple(str(name) for name in state if name != "model")
    lines = [
        f"{tensors} tensors are in {path}: a job with this state folder begins from them at step 0"
    ]
    if names:
        lines.append(f"without {store.shortened(names)}: a job begins from weights alone")
    answer = {
        "source": str(asked.source), "path": str(path), "tensors": tensors, "left_out": names,
    }  # fmt: skip
    return [(answer, lines)]


def prune(asked: argparse.Namespace) -> list[Answer]:
    """Remove what is old; never the newest that verify and are known to train, two of one rank's
    own. What is damaged is not counted among those kept, and goes once it is older than they; of
    another version it stays. If nothing here unpacks those all stay."""
    paths = store.found_in(asked.path)
    known = _suspects(paths)
    trains = [path for path in paths if _state_of(path) not in {None, *known}]
    # Not the newest alone, which another rank may not have yet.
    keep = max(asked.keep, KEEP_LOCAL) if any(map(_is_of_one_rank, trains)) else asked.keep
    kept: list[Path] = []
    not_judged: list[Path] = []
    try:
        for path in trains:
            findings = _verified(asked, path)
            if _is_not_judged(findings):
                not_judged.append(path)
            elif not findings:
                kept.append(path)
            if len(kept) == keep:
                break
    except NotInstalled as error:
        raise NotInstalled(f"{error}; until it was checked, nothing is removed") from error
    if not kept:
        why = "verifies" if trains else "can be read and is not known to lead to NaN"
        raise Damaged(
            f"none of the {len(paths)} checkpoints in {asked.path} {why}: all stay; "
            f"{store.WHICH_ARE_WHOLE} {asked.path}"
        )
    newer = paths[: paths.index(kept[-1])]
    stay = [*kept, *not_judged]
    needed = store.led_to(stay)
    answers = []
    for path in paths:
        if path in stay or store.is_needed(path, needed) or _may_be_whole(path):
            continue
        if (path in newer or len(kept) < keep) and _state_of(path) not in known:
            continue  # it may be well, and the disk ill
        if asked.older_than is not None and _age_s(path) <= asked.older_than * DAY_S:
            continue
        left = None if asked.dry_run else store.remove(path)
        flaws = [] if left is None else [f"{path.name} could not be removed: {left} is left"]
        word = "would remove" if asked.dry_run else "removed"
        removed = not (asked.dry_run or flaws)
        answer = {"path": str(path), "removed": removed, "findings": flaws}
        answers.append((answer, flaws or [f"{word} {path.name}"]))
    nothing = {"path": str(asked.path), "removed": False}
    answers = answers or [(nothing, ["nothing to remove"])]
    if len(kept) > asked.keep:
        why = (
            f"{keep} are kept, not {asked.keep}: these are the parts of one rank of several, and "
            "the newest may be of a step that another rank does not have"
        )
        answers.append(({**nothing, "kept": keep, "why": why}, [why]))
    return answers


def _suspects(paths: Sequence[Path]) -> set[State]:
    """The states that led to NaN, of those in the folder of these. Raises OSError, ValueError."""
    folder = paths[0].absolute().parent
    if (file := folder / FILE).exists() and not file.is_file():  # nobody may ever write to it
        raise ValueError(f"{file} is no regular file: remove it")
    if store.OWN.fullmatch(folder.name) and not file.exists():
        _say_untold(f"{folder}", "; a copy of it here counts")
    return suspects(folder)


def _say_untold(place: str, more: str = "") -> None:
    """Jobs keep that list in their shared folder alone."""
    words = f"{place} does not say which of them led to NaN: {FILE} beside the checkpoints in the "
    print(_printable(f"{words}job's shared folder does{more}"), file=sys.stderr)  # noqa: T201


def _state_of(path: Path) -> State | None:
    """Epoch and step; None if it cannot be read."""
    try:
        manifest = store.manifest_of(path)
    except Damaged:
        return None
    return store.epoch_of(manifest), manifest.step


def _is_of_one_rank(path: Path) -> bool:
    """Of one that is removed just now it does not matter."""
    try:
        return store.is_of_one_rank(store.manifest_of(path))
    except Damaged:
        return False


def _may_be_whole(path: Path) -> bool:
    """Whether we only cannot tell: it is of another version, or its disk is ill."""
    try:
        store.manifest_of(path)
    except (OtherVersion, store.Unreadable):
        return True
    except Damaged:
        return False
    return False


# --- helpers --------------------------------------------------------------------------------------


def _bar(asked: argparse.Namespace, what: str, size: int) -> closing[Bar]:
    """For whoever wants to read the answer, and waits for it."""
    return closing(Bar(what, size, shown=not asked.json))


def size_of(path: Path) -> int:
    """Bytes of tensors; 0 if that cannot be told."""
    try:
        return store.manifest_of(path).size
    except Damaged:
        return 0


def _age_s(path: Path) -> float:
    """Of one that another removed just now: none."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _path_or_url(text: str) -> Path | str:
    """Of an object store, or a holder."""
    return text if "://" in text else Path(text)


def _folder(text: str) -> Path:
    if text.startswith(in_memory.SCHEME):
        raise argparse.ArgumentTypeError(
            "only ls and verify look into a node's memory: a job that starts takes a state from "
            f"there and saves it to its folders, which can be given; found {text}"
        )
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"only ls and verify look into an object store: copy {text} to a folder first, and "
            f"give that; from S3 by aws s3 sync {text} FOLDER"
        )
    return Path(text)


def _here(text: str) -> Path:
    """Of what other tools read and write."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"a place on this machine is expected, found {text}: copy from there first, or to "
            "there afterwards"
        )
    return Path(text)


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1 is kept")
    return value


def _days(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError("a number of days, 0 or more, is expected")
    return value


VERBS: dict[str, Callable[[argparse.Namespace], Sequence[Answer]]] = {
    "ls": ls, "inspect": inspect, "verify": verify, "diff": diff, "export": export,
    "import": import_, "prune": prune,
}  # fmt: skip


class _Arguments(argparse.ArgumentParser):
    """Says what is wrong with the arguments in JSON too, where JSON is asked for."""

    given: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        if "--json" in self.given:
            print(json.dumps([{"error": message}]))  # noqa: T201
        super().error(message)


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    _Arguments.given = sys.argv[1:] if arguments is None else arguments
    parser = _Arguments(
        "python -m runtime.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    one: dict[str, _Arguments] = {}
    for verb, text in {
        "ls": "list checkpoints, newest first",
        "inspect": "who made the newest one, and every tensor in it",
        "verify": "read every byte again; name what is damaged",
        "diff": "what differs between two, tensor by tensor",
        "export": "write the newest one for another tool",
        "import": "begin a new job from what another tool wrote",
        "prune": "remove old ones",
    }.items():
        one[verb] = verbs.add_parser(verb, help=text)
        one[verb].add_argument("--json", action="store_true", help="print one list of objects")
    for verb in ("ls", "verify"):
        one[verb].add_argument("path", type=_path_or_url)
    for verb in ("inspect", "export", "prune"):
        one[verb].add_argument("path", type=_folder)
    one["diff"].add_argument("left", type=_folder)
    one["diff"].add_argument("right", type=_folder)
    one["export"].add_argument("out", type=_here, help="a name that nothing has yet")
    one["export"].add_argument("--to", required=True, choices=("dcp", "safetensors", "torch"))
    one["import"].add_argument(
        "source", type=_here, help="a torch or safetensors file, a DCP or a Hugging Face folder"
    )
    one["import"].add_argument("state_dir", type=_here, help="DRYDOCK_STATE_DIR of the new job")
    one["import"].add_argument(
        "--strip", default="", metavar="PREFIX", help="of the tensors' names, as in 'module.'"
    )
    one["prune"].add_argument(
        "--keep", type=_count, default=store.KEEP, help="how many of the newest to keep"
    )
    one["prune"].add_argument(
        "--older-than", type=_days, metavar="DAYS", help="keep what is younger, too"
    )
    one["prune"].add_argument("--dry-run", action="store_true", help="only say what would go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends with `head`
    for stream in (sys.stdout, sys.stderr):  # names are anybody's, and locales old
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    for number in (signal.SIGTERM, signal.SIGHUP):  # what is half done is removed
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # nothing here needs it
    sys.exit(main())
