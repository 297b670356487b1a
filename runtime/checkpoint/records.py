"""Compares what torch.save wrote with the checksums that it carries, which torch.load does not."""

from __future__ import annotations

import zipfile
from typing import IO


class Odd(ValueError):
    """It is not what it should be; the message says what was expected, and found."""


def refuse_damaged(file: IO[bytes], what: str) -> None:
    """Raises Odd if one of its records is not what was written. What is no zip archive, as torch
    writes them since 1.6, is left to who reads it."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile:
        return
    if damaged is not None:
        raise Odd(
            f"{what} is damaged: the record {damaged} has not its checksum (one written after "
            "torch.serialization.set_crc32_options(False) has none: save it again without)"
        )
