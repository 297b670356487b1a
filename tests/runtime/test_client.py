"""Messages outlive a control plane that is away, and arrive once it is back."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from runtime import client
from runtime.client import Directive, Ledger, Sender, Stopped, Trouble
from tests.runtime.replicas import PATIENCE_S, TOKEN, Fleet, until


class Door:
    """A stand-in for ingest: keeps what it is sent, answers what the test says."""

    def __init__(self, port: int = 0) -> None:
        self.refuses = "nothing"
        self.at_most = 1 << 20  # bytes in a body
        self.batches: list[dict[str, Any]] = []
        self.reply: dict[str, Any] = {"ledger_step": -1, "ledger_epoch": -1, "directives": []}
        self.standing: Callable[[], dict[str, Any]] = dict  # more of it, by what was told
        door = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                authorised = self.headers["Authorization"] == f"Bearer {TOKEN}"
                large = len(body) > door.at_most
                refused = large or door.refuses.encode() in body
                door.batches += [] if refused else [json.loads(body)]
                answer = json.dumps(door.reply | door.standing()).encode()
                status = 413 if large else 422 if refused else 200 if authorised else 401
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_args: Any) -> None:
                """The tests read `batches` instead."""

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def messages(self, kind: str) -> list[dict[str, Any]]:
        found = [m for batch in list(self.batches) for m in batch["messages"]]
        return [m for m in found if m["type"] == kind]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.close()


def make_sender(url: str) -> Sender:
    return Sender(url, TOKEN, job="job_t", replica=0, rank=0, placement="plc_0")


def wait_for_troubles(door: Door, count: int) -> None:
    until(lambda: len(door.messages("trouble")) >= count, f"{count} messages arrive")


def test_messages_are_kept_while_the_door_is_shut_and_arrive_in_order() -> None:
    shut = Door()
    shut.close()
    sender = make_sender(shut.url)
    sender.start()
    for number in range(300):
        sender.tell(Trouble(kind="test", text=str(number), at=1.0))

    opened = Door(shut.port)
    until(lambda: len(opened.messages("trouble")) >= 300, "all messages arrive")
    sender.close(5.0)
    opened.close()

    assert [m["text"] for m in opened.messages("trouble")] == [str(n) for n in range(300)]
    assert opened.batches[0]["placement"] == "plc_0"


def test_that_the_control_plane_does_not_hear_it_is_in_its_log_once(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "UNHEARD_S", 0.0)
    sender = Sender(door.url, "wrong", job="job_t", replica=0, rank=0, placement="plc_0")
    sender.start()
    for number in range(3):
        sender.tell(Trouble(kind="test", text=str(number), at=1.0))
        wait_for_troubles(door, number + 1)
    sender.close(5.0)

    (said,) = [one.getMessage() for one in caplog.records if "unheard" in one.getMessage()]
    assert "answered 401" in said
    assert "is DRYDOCK_URL the control plane's address, and DRYDOCK_TOKEN this job's?" in said


def test_a_restart_of_the_control_plane_is_in_no_log(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    shut = Door()
    shut.close()
    sender = make_sender(shut.url)
    sender.start()
    sender.tell(Trouble(kind="test", text="0", at=1.0))
    opened = Door(shut.port)
    wait_for_troubles(opened, 1)
    sender.close(5.0)
    opened.close()

    assert "unheard" not in caplog.text


def test_what_the_script_draws_is_the_same_while_the_control_plane_is_away(door: Door) -> None:
    door.refuses = "trouble"
    random.seed(7)
    drawn = random.getstate()
    sender = make_sender(door.url)
    sender.start()
    sender.tell(Trouble(kind="k", text="refused", at=1.0))
    sender.tell(Trouble(kind="k", text="refused", at=2.0))
    sender.tell(Stopped(step=1, reason="left the loop", at=3.0))
    until(lambda: door.messages("stopped"), "it has come back to the door several times")
    sender.close(5.0)

    assert random.getstate() == drawn


def test_a_directive_is_obeyed_once_however_often_it_is_said(door: Door) -> None:
    obeyed: list[Directive] = []
    door.reply["directives"] = [{"id": "dir_1", "verb": "checkpoint", "args": {}}]
    sender = make_sender(door.url)
    sender.speaks = True
    sender.on_directive = obeyed.append
    sender.start()

    for number in range(3):
        sender.tell(Trouble(kind="test", text=str(number), at=1.0))
        wait_for_troubles(door, number + 1)
    sender.close(5.0)

    assert [d.verb for d in obeyed] == ["checkpoint"]


def test_however_many_directives_are_said_at_once_each_is_obeyed_once(door: Door) -> None:
    obeyed: list[str] = []
    door.reply["directives"] = [{"id": f"dir_{n}", "verb": "checkpoint"} for n in range(300)]
    sender = make_sender(door.url)
    sender.speaks = True
    sender.on_directive = lambda directive: obeyed.append(directive.id)
    sender.start()

    for number in range(3):
        sender.tell(Trouble(kind="test", text=str(number), at=1.0))
        wait_for_troubles(door, number + 1)
    sender.close(5.0)

    assert obeyed == [f"dir_{n}" for n in range(300)]


def test_what_was_obeyed_and_is_said_no_more_is_forgotten_in_the_end(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "OBEYED_KEPT", 2)
    obeyed: list[str] = []
    sender = make_sender(door.url)
    sender.speaks = True
    sender.on_directive = lambda directive: obeyed.append(directive.id)
    sender.start()

    for number in range(5):
        door.reply["directives"] = [{"id": f"dir_{number}", "verb": "checkpoint"}]
        sender.tell(Trouble(kind="test", text=str(number), at=1.0))
        until(lambda number=number: len(obeyed) > number, "it is obeyed")  # type: ignore[misc]
    sender.close(5.0)

    assert [*sender._obeyed] == ["dir_2", "dir_3", "dir_4"]


def test_a_directive_that_is_said_before_anybody_listens_is_obeyed_once_somebody_does(
    door: Door,
) -> None:
    obeyed: list[Directive] = []
    door.reply["directives"] = [{"id": "dir_1", "verb": "stop", "args": {}}]
    sender = make_sender(door.url)
    sender.start()
    for number in range(2):  # the second one is sent once the first reply was heard
        sender.tell(Trouble(kind="test", text=str(number), at=1.0))
        wait_for_troubles(door, number + 1)

    sender.on_directive = obeyed.append
    sender.tell(Trouble(kind="test", text="listens", at=1.0))
    until(lambda: obeyed, "it is obeyed")
    sender.close(5.0)

    assert [d.verb for d in obeyed] == ["stop"]


def test_a_checkpoint_is_made_by_whoever_speaks_by_then(door: Door) -> None:
    """Not by all who hear of it, each at another time; who spoke before may be gone."""
    obeyed: list[str] = []
    door.reply["directives"] = [{"id": "dir_1", "verb": "checkpoint", "args": {}}]
    sender = make_sender(door.url)
    sender.on_directive = lambda directive: obeyed.append(directive.id)
    sender.start()
    for number in range(2):  # the second one is sent once the first reply was heard
        sender.tell(Trouble(kind="test", text=str(number), at=1.0))
        wait_for_troubles(door, number + 1)
    before = list(obeyed)

    sender.speaks = True
    until(lambda: obeyed, "it is obeyed")
    sender.close(5.0)

    assert (before, obeyed) == ([], ["dir_1"])


def test_who_has_no_news_asks_now_and_then_whether_it_is_to_end(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "INTERVAL_S", 0.02)
    monkeypatch.setattr(client, "ASK_S", 0.02)
    obeyed: list[str] = []
    first = make_sender(door.url)
    second = Sender(door.url, TOKEN, job="job_t", replica=0, rank=1, placement="plc_0")
    for sender in (first, second):
        sender.on_directive = lambda directive: obeyed.append(directive.verb)
        sender.start()
    save = {"id": "dir_1", "verb": "checkpoint", "args": {}}
    stop = {"id": "dir_2", "verb": "stop", "args": {}}

    door.reply["directives"] = [save]  # which is for who speaks: others hear it at other times
    until(lambda: len(door.batches) >= 3, "it asks")
    door.reply["directives"] = [save, stop]
    until(lambda: obeyed, "it hears of the end")
    first.close(5.0)
    second.close(5.0)

    assert obeyed == ["stop"]
    assert {(batch["rank"], len(batch["messages"])) for batch in door.batches} == {(0, 0)}


def test_a_message_that_is_refused_for_good_does_not_hold_up_the_others(door: Door) -> None:
    door.refuses = "unbearable"
    sender = make_sender(door.url)
    for text in ("before", "unbearable", "after"):
        sender.tell(Trouble(kind="test", text=text, at=float("nan")))

    sender.start()
    until(lambda: len(door.messages("trouble")) == 2, "the others arrive")
    sender.close(5.0)

    assert [m["text"] for m in door.messages("trouble")] == ["before", "after"]
    assert {m["at"] for m in door.messages("trouble")} == {None}


def test_a_refused_ledger_takes_no_message_with_it(door: Door) -> None:
    door.refuses = '"type": "ledger"'
    sender = make_sender(door.url)
    sender.ledger = lambda step, _epoch: [
        Ledger(step_from=step + 1, step_to=step + 5, epoch=1, samples=5)
    ]
    sender.start()
    for number in range(3):
        sender.tell(Trouble(kind="test", text=str(number), at=1.0))
        wait_for_troubles(door, number + 1)
    sender.close(5.0)

    assert [m["text"] for m in door.messages("trouble")] == ["0", "1", "2"]


def test_whatever_fails_once_the_sender_goes_on(door: Door) -> None:
    sender = make_sender(door.url)
    door.reply["directives"] = [{"verb": "has no id"}]
    sender.start()
    sender.tell(Trouble(kind="test", text="before", at=1.0))
    wait_for_troubles(door, 1)
    door.reply["directives"] = []
    sender.tell(Trouble(kind="test", text="after", at=1.0))
    wait_for_troubles(door, 2)
    sender.close(5.0)

    assert door.messages("trouble")[-1]["text"] == "after"


def test_the_ledger_is_told_from_where_the_control_plane_stands(door: Door) -> None:
    asked: list[tuple[int, int]] = []

    def ledger(step: int, epoch: int) -> list[Ledger]:
        asked.append((step, epoch))
        return [Ledger(step_from=step + 1, step_to=step + 5, epoch=epoch, samples=5)]

    door.reply |= {"ledger_step": 41, "ledger_epoch": 7}
    sender = make_sender(door.url)
    sender.ledger = ledger
    sender.start()
    sender.tell(Trouble(kind="test", text="hello", at=1.0))
    until(lambda: door.messages("ledger"), "a ledger arrives")
    sender.close(5.0)

    assert door.messages("ledger")[0]["step_from"] == 42
    assert set(asked) == {(41, 7)}


def test_a_ledger_too_large_for_one_body_is_told_in_several(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "INTERVAL_S", 0.02)
    ranges = [Ledger(step_from=step, step_to=step, epoch=1, samples=5) for step in range(40)]
    door.at_most = 30 * len(json.dumps(client.encode(ranges[-1])))
    sender = make_sender(door.url)
    sender.speaks = True
    sender.ledger = lambda _step, _epoch: ranges[len(door.messages("ledger")) :]
    sender.start()
    until(lambda: len(door.messages("ledger")) == 40, "all of it arrives")
    door.at_most = 1 << 20
    ranges += ranges
    until(lambda: len(door.messages("ledger")) == 80, "so does what comes then")
    sender.close(5.0)

    told = [batch["messages"] for batch in door.batches if batch["messages"]]
    assert [len(messages) for messages in told] == [20, 20, 40]
    assert [m["step_from"] for m in door.messages("ledger")] == [*range(40), *range(40)]


def test_the_end_tells_all_of_a_ledger(door: Door) -> None:
    """Though there was no word of the control plane before, and it takes some at a time."""
    ranges = [Ledger(step_from=step, step_to=step, epoch=1, samples=5) for step in range(250)]
    sender = make_sender(door.url)
    sender.ledger = lambda step, _epoch: ranges[step + 1 :]
    door.standing = lambda: {
        "ledger_step": max([-1, *(one["step_to"] for one in door.messages("ledger"))]),
        "ledger_epoch": 1,
    }
    sender.start()
    sender.tell(Trouble(kind="test", text="hello", at=1.0))
    sender.close(PATIENCE_S)

    assert [one["step_from"] for one in door.messages("ledger")] == [*range(250)]


def test_a_forked_child_keeps_no_dead_replica_alive(
    door: Door, make_fleet: Callable[..., Fleet]
) -> None:
    """As a loader's worker that was forked beside the training."""
    fleet = make_fleet(3, url=door.url, options={"forks_at": 5})
    fleet.start()
    fleet.wait_for_step(10)
    fleet.kill(1)
    until(lambda: door.messages("regrouped"), "the survivors tell that they went on")
    fleet.stop()

    (lost,) = door.messages("peer_lost")
    assert lost["replica"] == 1
    # What is told of it may be that it did not return: where the coordinator had not run either.
    log = (fleet.folder / "coordinator.log").read_text()
    assert "gone replica=1 placement=plc_2 how=reset" in log


def test_a_job_tells_its_life(door: Door, make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(2, url=door.url, options={"checkpoint_s": 0.2})
    fleet.start()
    until(lambda: door.messages("ledger"), "a ledger arrives")
    fleet.kill(0)
    until(lambda: door.messages("regrouped"), "the survivor tells that it went on")
    until(lambda: door.messages("checkpoint"), "a checkpoint is told")
    door.reply["directives"] = [{"id": "dir_9", "verb": "stop", "args": {}}]
    assert fleet.ranks[1].wait(PATIENCE_S) == 0

    assert {m["pid"] for m in door.messages("hello")} == {p.pid for p in fleet.started[1:]}
    (lost,) = door.messages("peer_lost")
    assert (lost["epoch"], lost["replica"], lost["placement"]) == (1, 0, "plc_1")
    (regrouped,) = door.messages("regrouped")
    assert (regrouped["epoch"], regrouped["lost"], regrouped["replicas"]) == (2, [0], [1])
    assert door.messages("progress")[-1]["replicas"] == [1]
    assert all(m["lost"] == m["duplicated"] == [] for m in door.messages("ledger"))
    (stopped,) = door.messages("stopped")
    assert (stopped["step"], stopped["because"]) == (fleet.last(1)["step"], "over")
