"""What a framework was asked for and a replica group cannot give, told before anything is trained.

A setting that would be quietly ignored is a wrong run; it is named, with what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterable


def refuse(adapter: str, checks: Iterable[tuple[bool, str]]) -> None:
    """Raises ValueError with the sentence of every check that is true."""
    sentences = [sentence for unmet, sentence in checks if unmet]
    if sentences:
        listed = "".join(f"\n- {sentence}" for sentence in sentences)
        raise ValueError(f"{adapter} cannot do what it was asked for:{listed}")


def overridden(one: object, base: type, names: Iterable[str]) -> list[str]:
    """Which of the methods are not those of `base`, by its class or as set on itself."""
    return [
        name
        for name in names
        if name in vars(one) or getattr(type(one), name) is not getattr(base, name)
    ]
