"""Events are never lost: not to a killed agent, nor to a server that is away or says no."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from node_agent import wire
from tests.node_agent.fleet import ControlPlane, Node, eventually, problem

XID = "NVRM: Xid (PCI:0000:10:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def kernel(node: Node, *lines: str) -> None:
    with (node.folder / "kernel.log").open("a") as log:
        log.write("".join(line + "\n" for line in lines))


def lines(plane: ControlPlane) -> list[str]:
    return [event.raw for event in plane.events_of("kernel_line")]


def test_lines_that_matter_are_sent_verbatim_and_others_are_not(agent: Node) -> None:
    kernel(agent, "usb 1-1: new device", XID, "  mce: [Hardware Error]: x\t ", "eth0: up")

    eventually(lambda: len(lines(agent.plane)) == 2)

    assert lines(agent.plane) == [XID, "  mce: [Hardware Error]: x\t "]


def test_an_event_survives_a_killed_agent_and_a_server_that_is_away(agent: Node) -> None:
    agent.plane.stop()
    kernel(agent, XID)
    eventually(lambda: XID in (agent.state / "events.jsonl").read_text())
    agent.kill()
    (agent.folder / "kernel.log").write_text("")
    agent.plane.start()
    agent.start()

    eventually(lambda: lines(agent.plane))

    assert lines(agent.plane) == [XID]


def test_lines_written_while_the_agent_was_away_are_sent_once(agent: Node) -> None:
    kernel(agent, f"{XID} 1")
    eventually(lambda: lines(agent.plane))
    agent.kill()
    kernel(agent, f"{XID} 2")
    agent.start()

    eventually(lambda: len(lines(agent.plane)) == 2)

    assert lines(agent.plane) == [f"{XID} 1", f"{XID} 2"]


def test_a_line_read_twice_has_the_same_id(agent: Node) -> None:
    kernel(agent, XID)
    eventually(lambda: lines(agent.plane))
    eventually((agent.state / "kernel-log-cursor.json").exists)
    agent.kill()
    (agent.state / "kernel-log-cursor.json").unlink()
    agent.start()
    kernel(agent, f"{XID} 2")

    eventually(lambda: len(lines(agent.plane)) == 2)

    assert lines(agent.plane) == [XID, f"{XID} 2"]


def counts(plane: ControlPlane) -> dict[str, int]:
    """How often each event came, as it was told last."""
    return {event.id: event.data.get("count", 1) for event in plane.events_of("kernel_line")}


def test_repeats_are_one_event_with_a_count_also_of_a_killed_agent(agent: Node) -> None:
    kernel(agent, *[XID] * 3000)
    eventually(lambda: lines(agent.plane))
    agent.kill()
    kernel(agent, *[XID] * 2000, "usb 1-1: new device", "NVRM: something else")
    agent.start()

    eventually(lambda: sorted(counts(agent.plane).values()) == [1, 5000])

    assert set(lines(agent.plane)) == {XID, "NVRM: something else"}


def test_the_same_line_in_a_log_that_was_cut_is_another_event(agent: Node) -> None:
    kernel(agent, f"{XID} a longer line")
    eventually(lambda: lines(agent.plane))
    (agent.folder / "kernel.log").write_text("")
    kernel(agent, XID)

    eventually(lambda: len(lines(agent.plane)) == 2)

    assert lines(agent.plane) == [f"{XID} a longer line", XID]


def test_rubbish_in_the_log_does_not_stop_it(agent: Node) -> None:
    with (agent.folder / "kernel.log").open("ab") as log:
        log.write(b"Xid \xff\xfe\x00" + b"x" * 200_000 + b"\n\n\r\n")
    kernel(agent, XID)

    eventually(lambda: XID in lines(agent.plane))

    assert max(len(line) for line in lines(agent.plane)) <= 8192


@pytest.mark.parametrize("name_it", ["by place", "by id", "not at all"])
def test_a_refused_event_is_put_aside_and_holds_up_no_other(agent: Node, name_it: str) -> None:
    agent.plane.refuse = lambda path, body: refuse_poison(path, body, name_it)
    agent.plane.stop()
    kernel(agent, f"{XID} 1", "NVRM: poison", f"{XID} 2", f"{XID} 3")
    eventually(lambda: "Xid" in (agent.state / "events.jsonl").read_text())
    agent.plane.start()

    eventually(lambda: len(lines(agent.plane)) == 3)

    assert lines(agent.plane) == [f"{XID} 1", f"{XID} 2", f"{XID} 3"]
    dead = (agent.state / "events.dead.jsonl").read_text().splitlines()
    assert [json.loads(line)["message"]["raw"] for line in dead] == ["NVRM: poison"]
    eventually(lambda: agent.log("dead_letter"))


def test_a_page_of_a_proxy_is_no_verdict_on_an_event(agent: Node) -> None:
    agent.plane.refuse = lambda path, body: proxy_page(path)
    kernel(agent, XID)
    eventually(lambda: agent.log("send_refused"))
    agent.plane.refuse = lambda path, body: None

    eventually(lambda: lines(agent.plane))

    assert lines(agent.plane) == [XID]
    assert not agent.log("dead_letter")


def refuse_poison(path: str, body: bytes, name_it: str) -> wire.Problem | None:
    events = {"/v1/events": body}.get(path, b'{"events": []}')
    raws: list[dict[str, Any]] = msgspec.json.decode(events)["events"]
    poison = [index for index, event in enumerate(raws) if "poison" in event["raw"]]
    verdicts = [
        {
            "by place": problem(422, "invalid", field=f"$.events[{index}].raw"),
            "by id": problem(422, "invalid", detail=f"event {raws[index]['id']} is bad"),
            "not at all": problem(422, "invalid"),
        }[name_it]
        for index in poison
    ]
    return next(iter(verdicts), None)


def proxy_page(path: str) -> Any:
    class Page(msgspec.Struct):
        status: int = 404

    return {"/v1/events": Page()}.get(path)
