"""`manage.py cluster NAME [--price P] [--currency C]`: make a cluster, or price one anew."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from decimal import Decimal
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions
from controlplane.fleet.models import Cluster


class Command(BaseCommand):
    help = (
        "Make a cluster, into which nodes are then let from the page of enrolment. Of one that is"
        " there already, change the price of a GPU-hour, by which incidents are valued."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", metavar="NAME", type=_name)
        parser.add_argument(
            "--price", type=_price, help="of a GPU-hour, as 2.50; 2.00 for a new cluster"
        )
        parser.add_argument(
            "--currency", type=_currency, help="three letters, as EUR; USD for a new cluster"
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        name: str = options["name"]
        price: Decimal | None = options["price"]
        currency: str | None = options["currency"]
        found = Cluster.objects.filter(name=name).first()
        if found is None:
            made = actions.create_cluster(
                SYSTEM,
                name,
                gpu_hour_price=Decimal(2) if price is None else price,
                currency=currency or "USD",
            )
            self.stdout.write(f"{made} was made: {_price_of(made)}")
            return
        before = _price_of(found)
        actions.set_price(
            SYSTEM,
            found.pk,
            gpu_hour_price=found.gpu_hour_price if price is None else price,
            currency=currency or found.currency,
        )
        found.refresh_from_db()
        if _price_of(found) == before:
            self.stdout.write(f"{found} is there already: {before}")
        else:
            self.stdout.write(
                f"{found}: {_price_of(found)}, {before.removesuffix(A_GPU_HOUR)} before"
            )


A_GPU_HOUR = " a GPU-hour"


def _price_of(cluster: Cluster) -> str:
    return f"{cluster.gpu_hour_price:.2f} {cluster.currency}{A_GPU_HOUR}"


def _name(text: str) -> str:
    # What begins as an id does would be taken for one wherever either is accepted.
    if not re.fullmatch(r"(?!clu_)[a-zA-Z0-9_-]{1,50}", text):
        raise ArgumentTypeError(
            f"{text!r}: a name is at most 50 letters, digits, - and _, and does not begin with clu_"
        )
    return text


def _price(text: str) -> Decimal:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,2})?", text, re.ASCII):
        raise ArgumentTypeError(f"{text!r}: a price is a number from 0 to 999999.99, as 2.50")
    return Decimal(text)


def _currency(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z]{3}", text):
        raise ArgumentTypeError(f"{text!r}: a currency is three letters, as EUR")
    return text.upper()
