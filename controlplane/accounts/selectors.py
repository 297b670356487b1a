"""Who stands behind an id: rows keep ids, pages show names."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.accounts.ids import person_id
from controlplane.accounts.models import User


def usernames(ids: Iterable[str]) -> dict[str, str]:
    """Names by id, in one query. What is no number is no person's id, and stays as it is."""
    wanted = set(ids)
    people = User.objects.filter(pk__in=[pk for one in wanted if (pk := person_id(one))])
    known = {str(pk): name for pk, name in people.values_list("pk", "username")}
    return {one: known.get(one, one) for one in wanted}
