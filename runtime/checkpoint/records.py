"""Compares what torch.save wrote with the checksums that it carries, which torch.load does not."""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from typing import IO

_ZIP = b"PK\x03\x04"  # how such an archive begins
LINE = 200  # characters of what others say of an error
#: In torch's refusal to unpickle something: what it is.
_IN_THE_WAY = re.compile(r"(?:Unsupported global:|unsupported) GLOBAL (\S+)")


class Odd(ValueError):
    """It is not what it should be; the message says what was expected, and found."""


def refuse_damaged(file: IO[bytes], what: str) -> None:
    """Raises Odd if one of its records is not what was written. What is no zip archive, as torch
    writes them since 1.6, is left to who reads it."""
    try:
        with zipfile.ZipFile(file) as archive:
            _refuse_packed(archive, what)
            damaged = archive.testzip()
    except (Odd, MemoryError):
        raise
    except zipfile.BadZipFile as error:
        file.seek(0)
        if file.read(len(_ZIP)) == _ZIP:  # which torch reads all the same
            raise Odd(f"{what} is damaged: {in_a_line(error)}: get it anew") from error
        return
    except Exception as error:  # of whatever its directory says that torch never writes
        raise Odd(f"{what} is damaged: {in_a_line(error)}: get it anew") from error
    if damaged is not None:
        raise Odd(
            f"{what} is damaged: the record {damaged} has not its checksum (one written after "
            "torch.serialization.set_crc32_options(False) has none: save it again without)"
        )


def _refuse_packed(archive: zipfile.ZipFile, what: str) -> None:
    """Raises Odd: who maps the file would take what is packed for the numbers."""
    packed = [one for one in archive.infolist() if one.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise Odd(
            f"{what} is damaged: its record {packed[0].filename} is packed, which torch never "
            "writes (if another tool packed it, load it with torch.load, and torch.save it again)"
        )


def record_sizes(file: IO[bytes]) -> Counter[int]:
    """How many bytes its records have, and how many have as many."""
    with zipfile.ZipFile(file) as archive:
        return Counter(one.file_size for one in archive.infolist())


def in_a_line(error: BaseException) -> str:
    """Of many lines, with colours and advice, the first; of torch's refusal to unpickle, which
    ends with how to do that all the same, what is in the way."""
    if found := _IN_THE_WAY.search(str(error)):
        return f"it holds {found[1]}, which is neither a tensor nor a plain value"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= LINE else f"{text[:LINE]}…"
