"""What random generators will draw is kept with a state, and drawn again."""

from __future__ import annotations

import random

import pytest
import torch
from torch._subclasses import FakeTensorMode

from runtime.generators import generators, set_generators
from tests.runtime.whole.runs import Alone


def test_generators_draw_again_what_they_drew() -> None:
    kept = generators()
    drawn = (random.getrandbits(64), torch.rand(3).tolist())

    set_generators(kept)

    assert (random.getrandbits(64), torch.rand(3).tolist()) == drawn


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    """What two cards draw from, of which the first is the current one."""
    made = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.random, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", made)
    return made


def on_cards(*numbers: int) -> torch.nn.ParameterList:
    """A model whose weights say that they are there."""
    with FakeTensorMode():
        return torch.nn.ParameterList(torch.empty(2, device=f"cuda:{one}") for one in numbers)


@pytest.mark.parametrize(("where", "kept"), [((1,), [1]), ((1, 0), [0, 1]), ((), [0])])
def test_what_is_kept_of_cards_is_what_the_model_s_will_draw(
    where: tuple[int, ...], kept: list[int], cards: list[torch.Generator]
) -> None:
    model = on_cards(*where)
    state = generators(model)
    drawn = [torch.rand(3, generator=one).tolist() for one in cards]

    set_generators(state, model)

    again = [torch.rand(3, generator=one).tolist() for one in cards]
    assert [place for place in range(2) if again[place] == drawn[place]] == kept


def test_a_job_keeps_what_its_model_s_card_will_draw(
    alone: Alone, cards: list[torch.Generator]
) -> None:
    whole = alone.start()  # it makes no step, and saves nothing
    whole.model = on_cards(1)

    kept = whole._state()["random"]["cuda"]

    whole.job.sender.close(0.0)
    assert torch.equal(kept, cards[1].get_state())
