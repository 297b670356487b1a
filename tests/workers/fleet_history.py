"""28 days of a fleet that never was: healthy nodes, a few lemons, and what looks like them."""

from __future__ import annotations

import math
import random
from dataclasses import asdict

from workers.lemons import DAYS, History

#: Failures of a node in a day (Meta's RSC-1: 6.5 in 1,000 node-days).
RATE = 6.5e-3


def made_up_fleet(
    seed: int, nodes: int = 1000, share: float = 0.012
) -> tuple[dict[str, History], set[str]]:
    """Histories by node, and who are the lemons: `share` of them, as in the study.

    A lemon fails 8 to 25 times as often. A rack's outage hits 16 nodes at once, one technician
    takes 30 out for an update, users exclude whom they please, and one job fails wherever it runs.
    """
    chance = random.Random(seed)  # noqa: S311 - a history, not a secret
    names = [f"node-{number:04}" for number in range(nodes)]
    lemons = set(chance.sample(names, round(share * nodes)))
    fleet = {}
    outage = set(names[(begin := chance.randrange(nodes - 16)) : begin + 16])
    updated = set(chance.sample(names, 30))
    unlucky = set(chance.sample(names, 40))
    for name in names:
        times = chance.uniform(8, 25) if name in lemons else 1.0
        told = dict.fromkeys(asdict(History()), 0.0)
        alone = _poisson(chance, 6)  # jobs that ran on it alone
        for _ in range(_poisson(chance, RATE * DAYS * times)):
            told["xids"] += chance.random() < 0.7
            told["tickets"] += chance.random() < 0.5
            told["outs"] += chance.random() < 0.8
            single = chance.random() < 0.25
            told["single_node_failures"] += single
            told["multi_node_failures"] += not single and chance.random() < 0.9
            told["exclusions"] += chance.random() < 0.15
        told["outs"] += (name in outage) + (name in updated)
        told["tickets"] += name in updated
        told["multi_node_failures"] += (name in outage) + (name in unlucky)
        told["exclusions"] += chance.random() < 0.02
        told["single_node_failure_rate"] = told["single_node_failures"] / alone if alone else 0.0
        fleet[name] = History(**told)
    return fleet, lemons


def _poisson(chance: random.Random, mean: float) -> int:
    limit, count, product = math.exp(-mean), 0, chance.random()
    while product > limit:
        count += 1
        product *= chance.random()
    return count
