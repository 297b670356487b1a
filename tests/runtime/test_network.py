"""An interface, a network or an address says where peers reach us: here those of the loopback."""

from __future__ import annotations

import pytest

from runtime.replica import network as network_module
from runtime.replica.network import ELSEWHERE, own_address

COORDINATOR = "127.0.0.1:7411"


@pytest.mark.parametrize(
    ("network", "address"),
    [
        ("", "127.0.0.1"),  # by which we reach the coordinator
        ("lo", "127.0.0.1"),
        ("127.0.0.0/8", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),  # one of several addresses of an interface
        ("127.0.0.2/32", "127.0.0.2"),
    ],
)
def test_the_address_that_is_named(network: str, address: str) -> None:
    assert own_address(COORDINATOR, network) == address


@pytest.mark.parametrize("network", ["eth77", "203.0.113.9", "203.0.113.0/24"])
def test_what_this_machine_does_not_have_is_refused_with_what_it_has(network: str) -> None:
    with pytest.raises(RuntimeError, match=f"'{network}', which is no .* it has .*lo 127.0.0.1"):
        own_address(COORDINATOR, network)


@pytest.mark.parametrize(
    ("coordinator", "elsewhere", "address"),
    [
        ("node1:7411", "198.18.0.7", "198.18.0.7"),
        ("node1:7411", None, "127.0.0.1"),  # it has no other
        ("localhost:7411", "198.18.0.7", "127.0.0.1"),
        ("127.0.1.1:7411", "198.18.0.7", "127.0.0.1"),
    ],
)
def test_a_machine_that_calls_itself_the_loopback_is_reached_by_others_all_the_same(
    monkeypatch: pytest.MonkeyPatch, coordinator: str, elsewhere: str | None, address: str
) -> None:
    """As /etc/hosts has it on Debian, on the machine of the coordinator."""
    ways = {coordinator.partition(":")[0]: "127.0.0.1"} | (
        {ELSEWHERE: elsewhere} if elsewhere else {}
    )

    def source(host: str) -> str:
        try:
            return ways[host]
        except KeyError:
            raise OSError("Network is unreachable") from None

    monkeypatch.setattr(network_module, "source_towards", source)

    assert own_address(coordinator) == address
