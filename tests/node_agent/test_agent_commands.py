"""Which commands an agent executes, and that it executes each of them once."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node_agent import procfs, wire
from tests.node_agent.fleet import DEADLINE_S, Node, eventually


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"node_id": "node-2"}, "node:"),
        ({"expires_at": time.time() - 1}, "expiry:"),
        ({"key": Ed25519PrivateKey.generate()}, "signature:"),
    ],
)
def test_a_command_that_is_not_ours_runs_nothing(
    agent: Node, how: dict[str, Any], why: str
) -> None:
    result = agent.plane.result(agent.plane.send(agent.rank(), **how))

    assert result.state == "refused"
    assert result.error.startswith(why)
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
    class Format(wire.Message, frozen=True, tag="format_disk", tag_field="verb"):
        path: str

    result = agent.plane.result(agent.plane.send(Format(path="/")))

    assert result.state == "refused"
    assert result.error.startswith("allow-list")


def test_a_repeated_id_is_not_executed_again_and_its_result_is_sent_again(agent: Node) -> None:
    pid = agent.started_rank()
    command_id = agent.plane.results[0].id
    agent.plane.send(agent.rank("p-2"), id=command_id)
    eventually(lambda: len(agent.plane.results) == 2)

    assert agent.plane.results[1] == agent.plane.results[0]
    assert agent.plane.results[1].output["pid"] == pid
    assert not procfs.with_environment("DRYDOCK_PLACEMENT", "p-2")


def test_a_repeated_id_is_known_after_the_agent_was_killed(agent: Node) -> None:
    agent.started_rank()
    command_id = agent.plane.results[0].id
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


def test_a_forged_command_does_not_use_up_the_id_of_the_genuine_one(agent: Node) -> None:
    stranger = Ed25519PrivateKey.generate()
    agent.plane.result(agent.plane.send(agent.rank(), id="cmd_1", key=stranger))
    agent.plane.results.clear()

    result = agent.plane.result(agent.plane.send(agent.rank(), id="cmd_1"))

    assert result.state == "done"


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


def refused_results(node: Node) -> list[dict[str, Any]]:
    return [line for line in node.log("send_refused") if line["path"] == "/v1/commands/result"]


def test_a_result_waits_for_a_server_that_is_away(agent: Node) -> None:
    command_id = agent.plane.send(agent.rank())
    agent.plane.refuse = lambda path, body: unavailable(path)
    # Not "command_result": that is said before the result lies in the spool, and whoever is killed
    # in between gives it when the command is offered again.
    eventually(lambda: refused_results(agent))
    agent.kill()
    agent.plane.refuse = lambda path, body: None
    agent.start()

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


def unavailable(path: str) -> wire.Problem | None:
    away = wire.Problem(status=503, code="unavailable", title="Away", detail="")
    return {"/v1/commands/result": away}.get(path)
