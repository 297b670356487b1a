"""A bar for a person at a terminal; a program that reads the output sees none of it."""

from __future__ import annotations

from io import StringIO

from runtime.checkpoint.progress import Bar


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_how_much_is_done_and_then_a_clear_line() -> None:
    out = Terminal()
    bar = Bar("step-00000012", 400_000_000, out)
    bar(100_000_000)
    bar.close()

    drawn = out.getvalue()
    assert "step-00000012 [#######......................." in drawn
    assert drawn.endswith("\r\033[K")
    assert bar.text(seconds=2.0).endswith("25%  50 MB/s")


def test_what_is_no_terminal_sees_nothing() -> None:
    out = StringIO()
    bar = Bar("x", 10, out)
    bar(5)
    bar.close()
    assert out.getvalue() == ""


def test_more_than_was_announced_is_all_of_it() -> None:
    bar = Bar("x", 0)
    bar(5)
    assert "100%" in bar.text(1.0)
