"""The others' ways to save, each with the options that serve it best where the state lies.

Imports torch; what only some environments have is imported by who needs it.
"""

from __future__ import annotations

import importlib
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from benchmarks.checkpoints.saving import Kept, Saving, at_once, now, sync
from benchmarks.checkpoints.states import State

#: Files that DCP writes at once: here two are faster than one.
WRITERS = 2
PAGE_BYTES = 4096


class Plain:
    """A base of those that need no preparation."""

    in_place = False

    def __init__(self, state: State, folder: Path) -> None:
        self.state = state
        self.device = next(iter(state.values())).device
        self.folder = folder

    def path(self, number: int) -> Path:
        return self.folder / f"save{number}"

    def prepare(self) -> None:
        pass

    def close(self) -> None:
        pass


class TorchSave(Plain):
    def save(self, number: int) -> Saving:
        path = self.path(number)
        path.mkdir()
        torch.save(self.state, path / "state.pt")
        sync(path)
        return at_once(path)

    def load(self, number: int, into: State) -> State:
        del into
        loaded: State = torch.load(self.path(number) / "state.pt", weights_only=True)
        return loaded


class Safetensors(Plain):
    def save(self, number: int) -> Saving:
        from safetensors.torch import save_file

        path = self.path(number)
        path.mkdir()
        save_file(self.state, path / "state.safetensors")
        sync(path)
        return at_once(path)

    def load(self, number: int, into: State) -> State:
        from safetensors.torch import load_file

        del into
        loaded: State = load_file(self.path(number) / "state.safetensors", device=str(self.device))
        for tensor in loaded.values():  # it is only mapped
            tensor.view(-1).view(torch.uint8)[::PAGE_BYTES].sum()
        return loaded


class Dcp(Plain):
    in_place = True

    def save(self, number: int) -> Saving:
        save(self.state, storage_writer=self.writer(number), no_dist=True)
        return at_once(self.path(number))

    def load(self, number: int, into: State) -> State:
        reader = FileSystemReader(self.path(number))
        load(into, storage_reader=reader, no_dist=True)
        return into

    def writer(self, number: int) -> FileSystemWriter:
        return FileSystemWriter(self.path(number), thread_count=WRITERS)


class DcpAsync(Dcp):
    """As it comes: it copies at once, into memory that it makes anew."""

    kind = AsyncCheckpointerType.THREAD

    def save(self, number: int) -> Saving:
        upload: Any = async_save(
            self.state,
            storage_writer=self.writer(number),
            async_checkpointer_type=self.kind,
            no_dist=self.kind is AsyncCheckpointerType.THREAD,
        )
        return self.saving(number, lambda: None, upload)

    def saving(self, number: int, settle: Any, upload: Future[Any]) -> Saving:
        saving = Saving(settle)
        path = self.path(number)

        def end(upload: Future[Any]) -> None:
            if error := upload.exception():
                saving.done.set_exception(error)
            else:
                saving.done.set_result(Kept(now(), None, path))

        upload.add_done_callback(end)
        return saving


class DcpProcess(DcpAsync):
    kind = AsyncCheckpointerType.PROCESS

    def prepare(self) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{self.folder}/meet", rank=0, world_size=1
        )

    def close(self) -> None:
        dist.destroy_process_group()


class DcpStaged(DcpAsync):
    """With a stager that is kept, copies on a thread, and takes its memory again."""

    shared = False

    def prepare(self) -> None:
        on_card = self.device.type == "cuda"  # else neither can be had
        options = StagingOptions(
            use_pinned_memory=on_card,
            use_shared_memory=self.shared,
            use_async_staging=True,
            use_non_blocking_copy=on_card,
        )
        self._stager = DefaultStager(options)

    def save(self, number: int) -> Saving:
        response: Any = async_save(
            self.state,
            storage_writer=self.writer(number),
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
            no_dist=self.kind is AsyncCheckpointerType.THREAD,
        )
        return self.saving(number, response.staging_completion.result, response.upload_completion)

    def close(self) -> None:
        self._stager.close()


class DcpStagedProcess(DcpStaged):
    kind = AsyncCheckpointerType.PROCESS
    shared = True

    def prepare(self) -> None:
        super().prepare()
        dist.init_process_group(
            "gloo", init_method=f"file://{self.folder}/meet", rank=0, world_size=1
        )

    def close(self) -> None:
        super().close()
        dist.destroy_process_group()


class Torchsnapshot(Plain):
    in_place = True

    def save(self, number: int) -> Saving:
        rival = importlib.import_module("torchsnapshot")
        path = self.path(number)
        pending = rival.Snapshot.async_take(str(path), {"state": rival.StateDict(**self.state)})
        saving = Saving(lambda: None)

        def end() -> None:
            try:
                pending.wait()
                sync(path)
            except BaseException as error:
                saving.done.set_exception(error)
                raise
            saving.done.set_result(Kept(now(), None, path))

        threading.Thread(target=end, name="torchsnapshot-end").start()
        return saving

    def load(self, number: int, into: State) -> State:
        rival = importlib.import_module("torchsnapshot")
        target = rival.StateDict(**into)
        rival.Snapshot(str(self.path(number))).restore({"state": target})
        return dict(target)
