"""How bodies are read and written: JSON only, small, and without text that a database refuses."""

# Django REST framework carries no types.
# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from rest_framework.exceptions import ParseError
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request

from controlplane.rest.problems import Problem

MAX_BODY_BYTES = 256 * 1024


def body_of(request: Request) -> Mapping[str, Any]:
    """What a write is sent with; 411 where it comes in chunks: without a length it would be taken
    for none, and a dry run be done."""
    if "Transfer-Encoding" in request.headers:
        raise Problem("length_required", "a body in chunks is not read: tell its length")
    told: Mapping[str, Any] = request.data
    return told


class JsonParser(BaseParser):
    media_type = "application/json"

    def parse(
        self, stream: Any, _media_type: str | None = None, _parser_context: Any = None
    ) -> dict[str, Any]:
        """One JSON object; an empty body is an empty one."""
        raw = stream.read(MAX_BODY_BYTES + 1)
        if len(raw) > MAX_BODY_BYTES:
            raise Problem("body_too_large", f"the body is larger than {MAX_BODY_BYTES} bytes")
        if not raw.strip():
            return {}
        if b"\\u0000" in raw:
            raise ParseError("text must not contain NUL: the database cannot keep it")
        try:
            body = msgspec.json.decode(raw)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ParseError(f"not JSON: {error}") from None
        if not isinstance(body, dict):
            raise ParseError("the body must be a JSON object")
        return body


class JsonRenderer(BaseRenderer):
    media_type = "application/json"
    format = "json"
    charset = None

    def render(
        self,
        data: Any,
        _accepted_media_type: str | None = None,
        _renderer_context: Mapping[str, Any] | None = None,
    ) -> bytes:
        return b"" if data is None else msgspec.json.encode(data)
