"""What broke, and whose fault it is: pure functions from evidence to a verdict with its reasons.

No Django, no I/O, no clock: the same evidence gives the same verdict, so decisions can be replayed.
"""

from workers.triage.assurance import confidence, to_verify
from workers.triage.catalogue import Catalogue, CatalogueEntry, SxidEntry
from workers.triage.lines import is_note, judge, judge_line, may_end_rank, parse
from workers.triage.loss import (
    SILENCE_ALONE,
    Cause,
    LossEvidence,
    NothingLost,
    NotYet,
    PlaceEvidence,
    cause_of_loss,
    first_to_go,
)
from workers.triage.readings import (
    BLAMES,
    DAMAGED,
    DAMAGED_MEMORY,
    beyond_remapping,
    judge_blame,
    judge_errors,
    judge_flag,
    judge_reading,
    judge_silence,
)
from workers.triage.verdicts import (
    ACTIONS,
    FOR_PEOPLE,
    LASTING,
    NODE_REPAIRS,
    SILENT,
    VAGUE_CODES,
    Fault,
    LineVerdict,
    Urgency,
    condemns_node,
    explains_silence,
    gravest,
    is_for_people,
    stronger,
)

__all__ = [
    "ACTIONS",
    "BLAMES",
    "DAMAGED",
    "DAMAGED_MEMORY",
    "FOR_PEOPLE",
    "LASTING",
    "NODE_REPAIRS",
    "SILENCE_ALONE",
    "SILENT",
    "VAGUE_CODES",
    "Catalogue",
    "CatalogueEntry",
    "Cause",
    "Fault",
    "LineVerdict",
    "LossEvidence",
    "NotYet",
    "NothingLost",
    "PlaceEvidence",
    "SxidEntry",
    "Urgency",
    "beyond_remapping",
    "cause_of_loss",
    "condemns_node",
    "confidence",
    "explains_silence",
    "first_to_go",
    "gravest",
    "is_for_people",
    "is_note",
    "judge",
    "judge_blame",
    "judge_errors",
    "judge_flag",
    "judge_line",
    "judge_reading",
    "judge_silence",
    "may_end_rank",
    "parse",
    "stronger",
    "to_verify",
]
