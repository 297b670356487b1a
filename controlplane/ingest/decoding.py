"""Bodies into messages: typed, bounded, and refused with the path of the field at fault.

What leaves this module can be stored; it must never let through what Postgres cannot hold.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import MISSING, fields
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from controlplane.errors import Refused
from node_agent import wire
from runtime import client

M = TypeVar("M")

MAX_RUNTIME_MESSAGES = 500
#: `dict[str, Any]` fields may nest this deep and no deeper.
MAX_DEPTH = 32

_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NOT_BRACKETS = bytes(set(range(256)) - _STEPS.keys())
_POINTER = re.compile(r" - at `\$\.?(?P<path>.*)`$")
_NAMED = re.compile(r"^Object (?:missing required|contains unknown) field `(?P<name>[^`]*)`")


def decode(body: bytes, kind: type[M]) -> M:
    """`body` as a message of this kind.

    Raises Refused: 400 `malformed_json` or 422 `invalid_field` with the field's path.
    """
    message = _parsed(body, kind)
    if b"\\u0000" in body or _deepest(body) > MAX_DEPTH:
        _refuse_unstorable(msgspec.to_builtins(message), "", 0)
    return message


def decode_enroll(body: bytes) -> wire.Enroll:
    """An enrolment whose public key is one. Raises Refused like `decode`."""
    message = decode(body, wire.Enroll)
    try:
        raw = base64.b64decode(message.public_key, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != 32:
        raise Refused(422, "invalid_field", "public_key", "must be 32 bytes in base64")
    return message


def decode_job_name(body: bytes) -> str:
    """The job that a batch claims to be of, before anything else of it is believed.

    Not looked at as a whole: whoever shows no token of this job must not cost us that.
    """
    return _parsed(body, _JobOnly).job


def decode_batch(body: bytes) -> tuple[client.Batch, list[client.Message]]:
    """A runtime's batch, and its messages taken out of it. Raises Refused like `decode`."""
    batch = decode(body, _BATCH)
    head = {f.name: getattr(batch, f.name) for f in fields(client.Batch) if f.name != "messages"}
    return client.Batch(**head, messages=[]), [_dataclass_of(message) for message in batch.messages]


class _JobOnly(msgspec.Struct):
    job: wire.Id


def _parsed(body: bytes, kind: type[M]) -> M:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, "malformed_json", "", f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep("") from None


# --- the runtime's dataclasses, with bounds -------------------------------------------------------

_Whole = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
_Small = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Real = Annotated[float, Meta(ge=-1e300, le=1e300)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]  # thirty years, which no time of ours is beside
_Placement = Annotated[str, Meta(max_length=40)]
_BOUNDED: dict[Any, Any] = {
    int: _Whole,
    float: _Real,
    str: wire.Text,
    list[int]: Annotated[list[_Small], Meta(max_length=100_000)],
    list[list[int]]: Annotated[
        list[Annotated[list[_Whole], Meta(min_length=2, max_length=2)]], Meta(max_length=100_000)
    ],
}
_BY_NAME: dict[str, Any] = {
    **dict.fromkeys(("at", "started_at", "committed_at", "sent_at"), wire.UnixTime),
    **dict.fromkeys(("pid", "replica", "rank"), _Small),
    "steps": Annotated[int, Meta(ge=1, le=2**31 - 1)],
    # JSON has no word but null for what is not a number; that a loss is none is worth keeping.
    **dict.fromkeys(("loss", "grad_norm", "every_s"), _Real | None),
    **dict.fromkeys(("seconds", "stall_s"), _Seconds),
    "ettr": Annotated[float, Meta(ge=-1, le=1)] | None,
    "stored": Annotated[int, Meta(ge=0, le=2**63 - 1)] | None,
    "job": wire.Id,
    "placement": _Placement,
    "entered": Annotated[list[_Placement], Meta(max_length=4096)],  # as many as a job has replicas
    "kind": wire.Short,
    "digest": Annotated[str, Meta(max_length=128)],
    "computed": Annotated[
        list[Annotated[list[_Small], Meta(min_length=3, max_length=3)]], Meta(max_length=100_000)
    ],
    "merged": Annotated[list[Annotated[int, Meta(ge=0, le=2**63 - 1)]], Meta(max_length=3)],
    "proof": Annotated[str, Meta(max_length=32)],
    "order": Annotated[
        dict[Annotated[str, Meta(max_length=32)], Annotated[int, Meta(ge=0, le=2**63 - 1)]],
        Meta(max_length=16),
    ],
}


def _bounded_twin(kind: type[Any], **overrides: Any) -> type[Any]:
    """A struct with the fields of a dataclass, each within what can be stored."""
    hints = get_type_hints(kind)
    required, optional = [], []
    for item in fields(kind):
        hint = hints[item.name]
        bounded = overrides.get(item.name) or _BY_NAME.get(item.name) or _BOUNDED.get(hint, hint)
        if item.default_factory is not MISSING:
            optional.append(
                (item.name, bounded, msgspec.field(default_factory=item.default_factory))
            )
        elif item.default is not MISSING:  # a job of an older version does not say it
            optional.append((item.name, bounded, msgspec.field(default=item.default)))
        else:
            required.append((item.name, bounded))
    tag = getattr(kind, "type", None)
    return msgspec.defstruct(
        kind.__name__,
        [*required, *optional],
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
        tag=tag,
        tag_field="type" if tag else None,
    )


_TWINS: dict[type[Any], type[client.Message]] = {
    _bounded_twin(kind): kind for kind in client.MESSAGES
}
_BATCH: type[Any] = _bounded_twin(
    client.Batch,
    messages=Annotated[list[reduce(or_, _TWINS)], Meta(max_length=MAX_RUNTIME_MESSAGES)],  # type: ignore[misc]
)


def _dataclass_of(twin: Any) -> client.Message:
    return _TWINS[type(twin)](**msgspec.structs.asdict(twin))


# --- refusals -------------------------------------------------------------------------------------


def _invalid_field(error: str) -> Refused:
    """msgspec's words, with the path to the field taken out of them."""
    pointer = _POINTER.search(error)
    path = pointer["path"] if pointer else ""
    named = _NAMED.match(error)
    if named:
        path = f"{path}.{named['name']}" if path else named["name"]
    return Refused(422, "invalid_field", path[:255], _POINTER.sub("", error))


def _deepest(body: bytes) -> int:
    """How deep the body nests, or more: brackets inside text are counted as well."""
    steps = (_STEPS[bracket] for bracket in body.translate(None, _NOT_BRACKETS))
    return max(accumulate(steps), default=0)


def _refuse_unstorable(value: Any, path: str, depth: int) -> None:
    """Refuse text with a NUL character, and values nested too deep: Postgres holds neither."""
    if depth > MAX_DEPTH:
        raise _too_deep(path)
    if isinstance(value, str):
        if "\0" in value:
            raise Refused(422, "invalid_field", path, "must not contain the character U+0000")
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_unstorable(key, path, depth)
            _refuse_unstorable(item, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_unstorable(item, f"{path}[{index}]", depth + 1)


def _too_deep(path: str) -> Refused:
    return Refused(
        422, "invalid_field", path[:255], f"must not nest deeper than {MAX_DEPTH} levels"
    )
