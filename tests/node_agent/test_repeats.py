"""What says the same again is one event with a count, whatever becomes of who counts."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from node_agent.collectors.repeats import GAP_S, TELL_S, Repeats, Told, meaning_of


def xid(rest: str, card: str = "0000:1b:00", stamp: float = 1.0) -> str:
    return f"[{stamp:12.6f}] NVRM: Xid (PCI:{card}): {rest}"


UNCONTAINED = "95, pid=5171, Uncontained: FBHUB. RST: Yes, D-RST: No"
FAULT = "31, pid=7, name=a, Ch 0000005a, intr 10000000. MMU Fault: faulted @ 0x17_{at:08x}"


def played(repeats: Repeats, lines: list[str], began: float, each_s: float) -> list[Told]:
    """What is told of these lines, and at last of all that is left."""
    told = []
    now = began
    for number, line in enumerate(lines):
        now = began + number * each_s
        taken = repeats.take(f"{began} {number}", line, now)
        told += [*([taken] if taken else []), *repeats.due(now)]
    return told + repeats.due(now + TELL_S)


def test_the_first_is_told_at_once_and_repeats_as_a_count() -> None:
    lines = [xid(UNCONTAINED, stamp=n / 1000) for n in range(10_000)]

    told = played(Repeats(), lines, 1000.0, 0.001)

    assert told[0].count == 1
    assert told[-1].count == 10_000
    assert {(one.key, one.line, one.first_at) for one in told} == {("1000.0 0", lines[0], 1000.0)}
    assert len(told) <= 2 + 10 / TELL_S


def test_addresses_and_channels_make_no_other_fault_but_cards_and_processes_do() -> None:
    same = [xid(FAULT.format(at=at)) for at in (0x1000, 0x2F000)]
    others = [
        xid(UNCONTAINED),
        xid(UNCONTAINED, "0000:5d:00"),
        xid(UNCONTAINED.replace("51", "52")),
    ]

    assert len({meaning_of(line) for line in same}) == 1
    assert len({meaning_of(line) for line in [*same, *others]}) == 4


def test_what_is_decoded_from_its_words_is_never_counted_together() -> None:
    lines = [
        xid("74, NVLink: fatal error detected on link 6(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"),
        xid("74, NVLink: fatal error detected on link 6(0x20000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"),
        xid("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"),
        xid("154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"),
        xid("149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000 0x00000000)"),
        xid("149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x025001c6 0x00000000 0x00000000)"),
    ]

    assert len({meaning_of(line) for line in lines}) == len(lines)


def test_after_a_pause_or_a_reset_the_same_words_are_news() -> None:
    repeats = Repeats()
    first = repeats.take("a", xid(UNCONTAINED), 0.0)
    repeats.take("b", xid(UNCONTAINED), 1.0)
    later = repeats.take("c", xid(UNCONTAINED), 2.0 + GAP_S)
    repeats.take("d", xid(UNCONTAINED), 2.5 + GAP_S)
    left = repeats.clear(3.0 + GAP_S)
    after_reset = repeats.take("e", xid(UNCONTAINED), 3.0 + GAP_S)

    assert [one and one.key for one in (first, later, after_reset)] == ["a", "c", "e"]
    assert [(one.key, one.count) for one in left] == [("c", 2)]


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=60),
    st.integers(0, 59),
    st.floats(0.0, 20.0),
)
def test_who_is_killed_and_reads_on_counts_the_same(
    cards: list[str], killed_at: int, each_s: float
) -> None:
    lines = [xid(UNCONTAINED, f"0000:{card}0:00") for card in cards]
    undisturbed = {one.key: one.count for one in played(Repeats(), lines, 0.0, each_s)}

    repeats = Repeats()
    told: dict[str, int] = {}
    for number, line in enumerate(lines):
        if number == killed_at:
            repeats = Repeats(json.loads(json.dumps(repeats.state())))
        for one in [
            repeats.take(f"0.0 {number}", line, number * each_s),
            *repeats.due(number * each_s),
        ]:
            told |= {one.key: one.count} if one else {}
    told |= {one.key: one.count for one in repeats.due(len(lines) * each_s + TELL_S)}

    assert told == undisturbed
    assert sum(told.values()) == len(lines)
