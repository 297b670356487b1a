"""What actions raise when they say no: one type per boundary, each with a remedy in its words."""

from __future__ import annotations


class Conflict(Exception):
    """The object's present state does not allow this. `detail` says what would."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class Refused(Exception):
    """A message from an agent or a job is not accepted; nothing was changed.

    `code` is stable, `field` names what to mend ("" where no single field is at fault).
    """

    def __init__(self, status: int, code: str, field: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.field = field
        self.detail = detail
