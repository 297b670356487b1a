"""What only a card can show: copies beside its kernels, and replicas that exchange by NCCL.

One card is enough: the replicas share it. Needs torch's build for CUDA.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import snapshot
from runtime.checkpoint.large_pages import mapped
from runtime.image import Staged
from runtime.snapshot import Copying, When, digest_of, state_of
from tests.runtime.replicas import ROOT
from tests.runtime.test_torture import torture, well_ended

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no card here")

ON_CARD = ("--json", "--options", json.dumps({"device": "cuda"}), "--replicas", "3")
NUMBERS = 1 << 24


def later(_name: str, _tensor: torch.Tensor) -> When:
    return "soon"


def busy() -> None:
    """Give the card a second's work."""
    left = torch.rand(4096, 4096, device="cuda")
    for _ in range(200):
        left = left @ left


def finished(copying: Copying) -> Staged:
    """By a thread beside this one, which waits as a training loop does."""
    made: list[Staged] = []
    finishing = threading.Thread(target=lambda: made.append(copying.finish()))
    finishing.start()
    copying.wait()
    finishing.join()
    return made[0]


def test_what_is_due_now_may_be_changed_while_the_card_still_copies() -> None:
    numbers = torch.arange(NUMBERS, device="cuda")
    before = numbers.cpu()

    busy()
    copying = Copying({"numbers": numbers}, 1)
    numbers.zero_()

    assert torch.equal(state_of(finished(copying))["numbers"], before)


def test_a_copy_holds_what_kernels_that_came_before_it_were_to_compute() -> None:
    numbers = torch.zeros(NUMBERS, device="cuda")

    busy()
    numbers.fill_(3.0)
    copying = Copying({"numbers": numbers}, 1, due=later)

    assert torch.equal(state_of(finished(copying))["numbers"], torch.full((NUMBERS,), 3.0))


def test_a_copy_by_another_thread_holds_what_the_training_s_stream_was_to_compute() -> None:
    numbers = torch.zeros(NUMBERS, device="cuda")
    torch.cuda.synchronize()
    training = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    made: list[Staged] = []

    with torch.cuda.stream(training):
        busy()
        numbers.fill_(3.0)
    aside = threading.Thread(
        target=lambda: made.append(Copying({"numbers": numbers}, 1, computed_on=training).finish())
    )
    aside.start()
    aside.join()

    assert torch.equal(state_of(made[0])["numbers"], torch.full((NUMBERS,), 3.0))


def test_a_copy_under_way_does_not_wait_for_the_step_beside_it() -> None:
    """The step's kernels come after it in the card's queue, on another stream."""
    numbers = torch.ones(NUMBERS, device="cuda")
    torch.cuda.synchronize()
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    copying = Copying({"numbers": numbers}, 1, due=later)
    busy()
    done.record()
    finished(copying)

    assert not done.query()  # type: ignore[no-untyped-call]


def test_pinned_memory_is_the_card_s_until_it_is_unmapped() -> None:
    torch.zeros(1, device="cuda")
    size = 64 << 20
    file = os.memfd_create("copy")
    os.truncate(file, size)

    for _ in range(2):  # the second would be refused if the first still were
        memory = mapped(file, size, writable=True)
        assert snapshot.pin(memory)
        assert torch.frombuffer(memory, dtype=torch.uint8).is_pinned()
        del memory

    os.close(file)


def test_a_digest_is_of_what_kernels_that_came_before_it_were_to_compute() -> None:
    numbers = torch.zeros(NUMBERS, device="cuda")
    expected = digest_of({"numbers": torch.full((NUMBERS,), 3.0)})

    busy()
    numbers.fill_(3.0)

    assert digest_of({"numbers": numbers}) == expected


class Settling(Copying):
    """Tells when the card was asked for all of it."""

    def __init__(self, *given: Any, **how: Any) -> None:
        self.asked = threading.Event()
        super().__init__(*given, **how)

    def _settle(self) -> None:
        self.asked.set()
        super()._settle()


def test_what_a_copy_was_asked_of_stays_until_it_is_copied() -> None:
    """A `state_dict` may make tensors anew, that nobody else holds."""
    kept = torch.zeros(NUMBERS, device="cuda")
    torch.cuda.synchronize()

    copying = Settling({"kept": kept, "made": kept + 5.0}, 1, due=later)
    with torch.cuda.stream(copying._stream):
        busy()
    made: list[Staged] = []
    finishing = threading.Thread(target=lambda: made.append(copying.finish()))
    finishing.start()
    copying.asked.wait()
    gc.collect()  # nobody else holds it by chance
    others = [torch.zeros(NUMBERS, device="cuda") for _ in range(4)]
    torch.cuda.current_stream().synchronize()  # they are written, and nothing is copied yet
    finishing.join()

    assert torch.equal(state_of(made[0])["made"], torch.full((NUMBERS,), 5.0))
    del others


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one card here")
def test_copies_from_a_card_begin_to_use_no_other() -> None:
    """In a process of its own, which has not used the first card before."""
    script = """
import threading, torch
from runtime.snapshot import Copying, bytes_of
numbers = torch.ones(8, device="cuda:1")
copying = Copying({"numbers": numbers}, 1, due=lambda _name, _tensor: "soon")
finishing = threading.Thread(target=copying.finish)
finishing.start()
copying.wait()
finishing.join()
sending = threading.Thread(target=bytes_of, args=(numbers,))
sending.start()
sending.join()
print([torch._C._cuda_hasPrimaryContext(card) for card in range(2)])
"""

    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)

    assert done.stdout.split() == [b"[False,", b"True]"]


@pytest.mark.parametrize(
    "words",
    [
        ("--faults", "4", "--kinds", "kill", "--phases", "forward,backward,reduce,optimizer"),
        ("--faults", "2", "--kinds", "stop,cut"),
        ("--faults", "2", "--kinds", "leave,coordinator"),
        ("--faults", "2", "--kinds", "crash,outage"),
    ],
    ids=lambda words: words[3],
)
def test_replicas_on_a_card_end_as_if_nothing_had_happened(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    report = well_ended(torture(tmp_path, *ON_CARD, "--seed", "4", *words))

    assert report["ledger"] == {"lost": 0, "duplicated": 0, "dropped": 0}
    assert report["survivor_deaths"] == 0


def test_so_do_replicas_that_are_divided(tmp_path: Path) -> None:
    words = ("--ranks", "2", "--faults", "1", "--kinds", "kill", "--phases", "reduce")

    report = well_ended(torture(tmp_path, *ON_CARD, "--seed", "4", *words))

    assert report["survivor_deaths"] == 0
