"""Which commands an agent executes, and that it executes each of them once."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node_agent import procfs, wire
from tests.node_agent.fleet import DEADLINE_S, Node, eventually, problem


class Format(wire.Message, frozen=True, tag="format_disk", tag_field="verb"):
    """A verb that no agent knows."""

    path: str


@pytest.mark.parametrize("verb", ["start_rank", "format_disk"])
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"node_id": "node-2"}, "node:"),
        ({"key": Ed25519PrivateKey.generate()}, "signature:"),
    ],
)
def test_what_is_no_order_to_this_node_runs_nothing_and_gets_no_answer(
    agent: Node, how: dict[str, Any], why: str, verb: str
) -> None:
    actions = {"start_rank": agent.rank(), "format_disk": Format(path="/")}
    agent.plane.send(actions[verb], **how)
    ours = agent.plane.send(wire.StopProcess(placement="p-9"))

    agent.plane.result(ours)

    assert [result.id for result in agent.plane.results] == [ours]
    assert [line["reason"][: len(why)] for line in agent.log("command_not_proven")] == [why]
    assert not procfs.with_environment("DRYDOCK_PLACEMENT", "p-1")


def test_a_command_whose_time_is_over_is_refused(agent: Node) -> None:
    result = agent.plane.result(agent.plane.send(agent.rank(), expires_at=time.time() - 1))

    assert result.state == "refused"
    assert result.error.startswith("expiry:")
    assert not procfs.with_environment("DRYDOCK_PLACEMENT", "p-1")


def test_a_clock_that_is_ahead_is_named_with_by_how_much(agent: Node) -> None:
    now = time.time()
    late = agent.plane.send(agent.rank(), issued_at=now - 75, expires_at=now - 55)

    error = agent.plane.result(late).error

    found = re.search(r"this clock is (\d+) to (\d+) s ahead of its own", error)
    assert found
    least, most = map(int, found.groups())
    assert 55 <= least < most == least + 20
    assert "set it (chrony)" in error


def test_a_program_outside_the_table_is_refused(agent: Node) -> None:
    result = agent.plane.result(agent.plane.send(agent.rank(program="bash")))

    assert result.state == "refused"
    assert "bash" in result.error


def test_a_name_that_would_leave_its_folder_is_refused(agent: Node) -> None:
    result = agent.plane.result(agent.plane.send(agent.rank(placement="..")))

    assert result.state == "refused"


def test_a_verb_that_the_agent_does_not_know_is_refused(agent: Node) -> None:
    result = agent.plane.result(agent.plane.send(Format(path="/")))

    assert result.state == "refused"
    assert result.error.startswith("allow-list")


@pytest.mark.parametrize(
    "payload",
    [
        "no JSON",
        "{}",
        '{"id": "c", "node_id": "node-1", "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
    ids=["words", "nothing", "depth"],
)
def test_what_cannot_be_read_as_a_command_is_logged_and_holds_up_no_other(
    agent: Node, payload: str
) -> None:
    agent.plane.offer(wire.SignedCommand(payload=payload, signature=""))

    assert agent.plane.result(agent.plane.send(wire.StopProcess(placement="p-9"))).state == "done"
    assert len(agent.log("command_unreadable")) == 1
    assert len(agent.log("agent_started")) == 1


def test_a_repeated_id_is_not_executed_again_and_its_result_is_sent_again(agent: Node) -> None:
    pid = agent.started_rank()
    command_id = agent.plane.results[0].id
    agent.plane.send(agent.rank("p-2"), id=command_id)
    eventually(lambda: len(agent.plane.results) == 2)

    assert agent.plane.results[1] == agent.plane.results[0]
    assert agent.plane.results[1].output["pid"] == pid
    assert not procfs.with_environment("DRYDOCK_PLACEMENT", "p-2")


def test_a_repeated_id_is_known_though_its_verb_is_not(agent: Node) -> None:
    agent.started_rank()
    agent.plane.send(Format(path="/"), id=agent.plane.results[0].id)
    eventually(lambda: len(agent.plane.results) == 2)

    assert agent.plane.results[1] == agent.plane.results[0]


def result_taken(agent: Node) -> None:
    """The agent knows by now that its result arrived, and sends it no more when it comes back."""
    eventually(lambda: '"gone"' in (agent.state / "results.jsonl").read_text())


def test_a_refused_verb_is_refused_for_ever(agent: Node) -> None:
    command_id = agent.plane.send(Format(path="/"))
    agent.plane.result(command_id)
    result_taken(agent)
    agent.kill()
    agent.start()
    agent.plane.send(agent.rank(), id=command_id)
    eventually(lambda: len(agent.plane.results) == 2)

    assert agent.plane.results[1] == agent.plane.results[0]
    assert not procfs.with_environment("DRYDOCK_PLACEMENT", "p-1")


def test_a_repeated_id_is_known_after_the_agent_was_killed(agent: Node) -> None:
    agent.started_rank()
    command_id = agent.plane.results[0].id
    result_taken(agent)
    agent.kill()
    agent.start()
    agent.plane.send(agent.rank("p-2"), id=command_id)
    eventually(lambda: len(agent.plane.results) == 2)

    assert agent.plane.results[1] == agent.plane.results[0]
    assert not procfs.with_environment("DRYDOCK_PLACEMENT", "p-2")


def test_a_second_agent_in_the_same_folder_says_so_and_ends(agent: Node) -> None:
    first = agent.process
    assert first is not None
    agent.start()
    second = agent.process
    assert second is not None
    status = second.wait(DEADLINE_S)
    agent.process = first

    assert status == 78
    assert f"another agent (pid {first.pid})" in agent.log("cannot_start")[0]["error"]
    assert agent.plane.result(agent.plane.send(agent.rank())).state == "done"


def test_of_an_order_that_was_altered_on_its_way_nothing_is_said_before_it_arrives(
    agent: Node,
) -> None:
    stranger = Ed25519PrivateKey.generate()
    agent.plane.send(agent.rank(), id="cmd_1", key=stranger)
    eventually(lambda: agent.log("command_not_proven"))
    agent.plane.send(agent.rank(), id="cmd_1")

    agent.plane.result("cmd_1")

    assert [result.state for result in agent.plane.results] == ["done"]


def test_a_start_interrupted_by_a_crash_is_done_if_its_process_lives(agent: Node) -> None:
    pid = agent.started_rank()
    command_id = agent.plane.results[0].id
    agent.kill()
    forget_results(agent)
    agent.plane.results.clear()
    agent.start()

    result = agent.plane.result(command_id)

    assert (result.state, result.output["pid"]) == ("done", pid)


def test_a_start_interrupted_before_its_process_failed_with_an_explanation(agent: Node) -> None:
    agent.started_rank()
    command_id = agent.plane.results[0].id
    agent.plane.result(agent.plane.send(wire.StopProcess(placement="p-1")))
    agent.kill()
    forget_results(agent)
    agent.plane.results.clear()
    agent.start()

    result = agent.plane.result(command_id)

    assert result.state == "failed"
    assert "restarted" in result.error
    assert not procfs.with_environment("DRYDOCK_PLACEMENT", "p-1")


def test_an_order_is_remembered_though_its_time_seems_long_over(agent: Node) -> None:
    agent.started_rank()
    command_id = agent.plane.results[0].id
    result_taken(agent)
    agent.kill()
    age_journal(agent)
    agent.start()
    agent.plane.send(agent.rank("p-2"), id=command_id)
    eventually(lambda: len(agent.plane.results) == 2)

    assert agent.plane.results[1] == agent.plane.results[0]
    assert not procfs.with_environment("DRYDOCK_PLACEMENT", "p-2")


def test_an_interrupted_order_is_settled_though_its_time_seems_long_over(agent: Node) -> None:
    pid = agent.started_rank()
    command_id = agent.plane.results[0].id
    agent.kill()
    forget_results(agent)
    age_journal(agent)
    agent.plane.results.clear()
    agent.start()

    result = agent.plane.result(command_id)

    assert (result.state, result.output["pid"]) == ("done", pid)


def refused_results(node: Node) -> list[dict[str, Any]]:
    return [line for line in node.log("send_refused") if line["path"] == "/v1/commands/result"]


def test_a_result_waits_for_a_server_that_is_away(agent: Node) -> None:
    agent.plane.refuse = lambda path, body: unavailable(path)
    command_id = agent.plane.send(agent.rank())
    # Not "command_result": that is said before the result lies in the spool, and whoever is killed
    # in between gives it when the command is offered again.
    eventually(lambda: refused_results(agent))
    agent.kill()
    agent.plane.refuse = lambda path, body: None
    agent.start()

    assert agent.plane.result(command_id).state == "done"


def test_a_result_of_another_nodes_command_is_put_aside_and_holds_up_no_other(
    agent: Node,
) -> None:
    not_ours = problem(403, "command_of_other_node", "this command was given to another node", "id")
    agent.plane.refuse = lambda _path, body: {True: not_ours}.get(b'"cmd_1"' in body)
    agent.plane.send(wire.StopProcess(placement="p-8"), id="cmd_1")

    result = agent.plane.result(agent.plane.send(wire.StopProcess(placement="p-9")))

    assert result.state == "done"
    dead = (agent.state / "results.dead.jsonl").read_text().splitlines()
    assert [json.loads(line)["message"]["id"] for line in dead] == ["cmd_1"]


def test_a_refusal_of_the_node_is_no_verdict_on_a_result(agent: Node) -> None:
    agent.plane.refuse = lambda path, _body: {
        "/v1/commands/result": problem(403, "node_revoked")
    }.get(path)
    command_id = agent.plane.send(wire.StopProcess(placement="p-9"))
    eventually(lambda: refused_results(agent))
    agent.plane.refuse = lambda _path, _body: None

    assert agent.plane.result(command_id).state == "done"


def test_stop_ends_a_process_and_may_be_repeated(agent: Node) -> None:
    agent.started_rank()
    stop = wire.StopProcess(placement="p-1", grace_s=5)

    first = agent.plane.result(agent.plane.send(stop))
    second = agent.plane.result(agent.plane.send(stop))

    assert (first.output, second.output) == ({"stopped": True}, {"stopped": True})
    exits = eventually(lambda: agent.plane.events_of("process_exited"))
    assert [(event.data["signal"], event.data["requested"]) for event in exits] == [(15, True)]


def forget_results(node: Node) -> None:
    """As if the agent had died between the effect and its note."""
    path = node.state / "commands.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [entry for entry in entries if "result" not in entry]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))


def age_journal(node: Node) -> None:
    """As if the clock had been set far ahead since."""
    path = node.state / "commands.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    aged = [{**entry, "expires_at": entry["expires_at"] - 30 * 86_400} for entry in entries]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in aged))


def unavailable(path: str) -> wire.Problem | None:
    away = wire.Problem(status=503, code="unavailable", title="Away", detail="")
    return {"/v1/commands/result": away}.get(path)
