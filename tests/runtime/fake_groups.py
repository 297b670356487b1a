"""Groups made up: some fail as NCCL's do, behind torch's interface, each in one way.

What they hold up is let go by the test; nothing here ends by itself.
"""

from __future__ import annotations

import threading
from typing import Any

import torch


class Works:
    """A collective that ends when it is told to."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        return self.over.is_set()

    def exception(self) -> Exception | None:
        return self.error

    def wait(self) -> None:
        self.over.wait()
        if self.error is not None:
            raise self.error


class Untold(Works):
    """Its error is told to nobody but who waits, as by torch before 2.13."""

    def exception(self) -> Exception | None:
        raise TypeError("Unregistered type : std::__exception_ptr::exception_ptr")


class Done(Works):
    """One that has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.over.set()


class Fake:
    """Gives one after another of the collectives that it was made with; its abort ends none."""

    def __init__(self, *works: Works) -> None:
        self.works = list(works)
        self.begun = 0
        self.aborts = 0

    def allreduce(self, _tensors: list[torch.Tensor], _options: Any) -> Works:
        self.begun += 1
        return self.works[self.begun - 1]

    def abort(self) -> None:
        self.aborts += 1


class Ends(Fake):
    """Its abort lets collectives end as if all were well, as NCCL's does."""

    def abort(self) -> None:
        super().abort()
        for work in self.works:
            work.over.set()


class Fails(Fake):
    """Its abort lets collectives end with an error."""

    def abort(self) -> None:
        super().abort()
        for work in self.works:
            work.error = RuntimeError("NCCL communicator was aborted")
            work.over.set()


class Slow(Ends):
    """Its abort takes as long as it is let."""

    def __init__(self, *works: Works) -> None:
        super().__init__(*works)
        self.free = threading.Event()

    def abort(self) -> None:
        super().abort()
        self.free.wait()


class Refuses(Ends):
    """Its abort fails."""

    def abort(self) -> None:
        super().abort()
        raise RuntimeError("ProcessGroup abort timed out")


class Stuck(Fake):
    """Its abort hangs, and who asks for anything meanwhile hangs with it."""

    def __init__(self, *works: Works) -> None:
        super().__init__(*works)
        self.lock = threading.Lock()
        self.free = threading.Event()

    def abort(self) -> None:
        super().abort()
        with self.lock:
            self.free.wait()


class Guarded(Works):
    """A collective of a group whose abort hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.group: Stuck | None = None
        self.asked = 0

    def is_completed(self) -> bool:
        assert self.group is not None
        self.asked += 1
        with self.group.lock:
            return super().is_completed()


class Blocks(Ends):
    """A collective after the first does not even begin: a peer died that was to be connected."""

    def __init__(self, *works: Works) -> None:
        super().__init__(*works)
        self.reached = threading.Event()
        self.free = threading.Event()

    def alltoall_base(self, *_given: Any) -> Works:
        self.reached.set()
        self.free.wait()
        return self.works[-1]


class Raises(Ends):
    """A collective after the first is refused."""

    def alltoall_base(self, *_given: Any) -> Works:
        raise RuntimeError("NCCL error: internal error")


class Alone:
    """The collectives of a job of one member."""

    def all_reduce(self, _buffer: torch.Tensor) -> None: ...

    def exchange(self, given: list[torch.Tensor], _sizes: list[int]) -> list[torch.Tensor]:
        return given

    def gather(self, mine: torch.Tensor, _members: int) -> torch.Tensor:
        return mine
