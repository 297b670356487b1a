"""Who stands behind an id: rows keep ids, pages show names."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.accounts.ids import person_id
from controlplane.accounts.models import User

#: Before the id of a person, where others than people may own a thing too.
OWNED = "user/"


def usernames(ids: Iterable[str]) -> dict[str, str]:
    """Names by id, in one query; of who owns a thing also by "user/" and the id. What is neither is
    no person's id, and stays as it is."""
    wanted = {one: person_id(one.removeprefix(OWNED)) for one in ids}
    people = User.objects.filter(pk__in=[pk for pk in wanted.values() if pk])
    known = dict(people.values_list("pk", "username"))
    return {one: known.get(pk, one) if pk else one for one, pk in wanted.items()}


def username(owner: str) -> str:
    """One of `usernames`."""
    return usernames([owner])[owner]
