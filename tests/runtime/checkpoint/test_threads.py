"""Several threads work on many items, and stop at the first that fails."""

from __future__ import annotations

import pytest

from runtime.checkpoint.threads import run_in_threads


def test_all_of_many_are_worked_on() -> None:
    done: list[int] = []

    run_in_threads(done.append, range(100), 4, "works")

    assert sorted(done) == [*range(100)]


def test_after_one_that_fails_no_other_is_begun() -> None:
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        [None, None, None][number]

    with pytest.raises(IndexError):
        run_in_threads(work, range(100), 1, "works")

    assert begun == [0, 1, 2, 3]
