"""What would come of an edited rule: stored signals judged by it, and nothing changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from django.utils import timezone

from controlplane.fleet.models import Cluster
from controlplane.form_actions import whole
from controlplane.health.catalogue import Kind, edited
from controlplane.incidents.selectors import WINDOWS
from workers.replay import Replayed, replay, stored, told_of
from workers.triage import ACTIONS

DEFAULT_WINDOW = "30d"
#: The page judges no more signals than this, the newest ones; `manage.py replay` judges all.
MAX_SIGNALS = 200
LARGEST_CODE = 999_999
#: What a rule may say; the others follow from what stands beside a line.
CHOICES = tuple(word for word in ACTIONS if word not in ("follow_primary", "undecodable"))


@dataclass(frozen=True)
class Edit:
    """One code, and what it is to call for."""

    kind: Kind
    number: int
    action: str
    window: str

    @property
    def row(self) -> str:
        """As it stands in a site's overlay."""
        return f"{self.kind},immediate_action\n{self.number},{self.action}"

    @property
    def file(self) -> str:
        return f"{self.kind}.csv"


@dataclass(frozen=True)
class Outcome:
    """What an edited rule would change."""

    judged: int  # decisions
    changed: list[Replayed]
    #: Not all were judged: there are more signals of this code.
    more: bool


def edit_of(query: Mapping[str, str]) -> Edit | str:
    """The edit that is asked for; what is wrong with it, in words; "" if nothing is asked."""
    if "code" not in query:
        return ""
    number = whole(query["code"].strip(), LARGEST_CODE)
    if number is None:
        return f"The code is a number, from 0 to {LARGEST_CODE}: 79, or 20034 of a switch."
    action = query.get("action", "")
    if action not in CHOICES:
        return f"No rule may say {action!r}: choose one of {', '.join(CHOICES)}."
    window = query.get("window", "")
    kind: Literal["xid", "sxid"] = "sxid" if query.get("kind") == "sxid" else "xid"
    return Edit(kind, number, action, window if window in WINDOWS else DEFAULT_WINDOW)


def outcome_of(edit: Edit, clusters: Iterable[Cluster]) -> Outcome:
    """What it would change of what was decided on the nodes of these clusters."""
    since = timezone.now() - timedelta(seconds=WINDOWS[edit.window][1])
    there = told_of(stored(since).filter(node__cluster__in=clusters), edit.kind, edit.number)
    newest = list(there.order_by("-observed_at").values_list("pk", flat=True)[: MAX_SIGNALS + 1])
    signals = there.filter(pk__in=newest[:MAX_SIGNALS])
    judged = list(replay(signals, edited(edit.kind, edit.number, edit.action)))
    changed = [one for one in judged if one.differs]
    return Outcome(len(judged), changed[::-1], len(newest) > MAX_SIGNALS)
