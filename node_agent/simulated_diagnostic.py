"""The field diagnostic of simulated cards: `python -m node_agent.simulated_diagnostic`.

Stands where the vendor's tool stands, and ends as it does: 0 the card passed, 1 it is defective, 2
it could not be examined. A card that it passes was reset. Standard library only.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from node_agent import cards, faults

PASS, FAIL, RETEST = 0, 1, 2
#: What shows in a card's entry that it is defective.
DEFECTS = ("remap_failed", "exhausted_banks", "sram_over_threshold")


def main() -> int:
    """Examine one simulated card and print the verdict; the result is the exit status.

    The status is PASS (0; the card was reset too), FAIL (1), or RETEST (2) for a card that is not
    listed or does not answer. Raises OSError or ValueError if the cards' file cannot be used.
    """
    parser = argparse.ArgumentParser(prog="python -m node_agent.simulated_diagnostic")
    parser.add_argument("--hardware", type=Path, required=True, help="the folder of the cards")
    parser.add_argument("--card", metavar="UUID", required=True)
    arguments = parser.parse_args()
    verdict = (RETEST, "RETEST: no such card")

    def examine(fitted: cards.Cards) -> cards.Cards:
        nonlocal verdict
        for position, card in enumerate(fitted):
            if card["uuid"] == arguments.card:
                verdict = _verdict(card)
                if verdict[0] == PASS:
                    fitted[position] = faults.after_reset(card)
        return fitted

    cards.edit(arguments.hardware, examine)
    status, word = verdict
    sys.stdout.write(f"{word}\n")
    return status


def _verdict(card: dict[str, Any]) -> tuple[int, str]:
    if card.get("unreadable"):
        return RETEST, "RETEST: the card does not answer"
    defects = [name for name in DEFECTS if card.get(name)]
    return (FAIL, f"FAIL: {', '.join(defects)}") if defects else (PASS, "PASS")


if __name__ == "__main__":
    sys.exit(main())
