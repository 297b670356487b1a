"""Real cards by NVML, read in a child process that can be killed, behind a deadline.

One halted GPU can block every NVML caller of its host in uninterruptible sleep. So no thread of
the agent ever calls NVML: a child does, a thread asks it, and the agent takes that thread's last
answer. A child that cannot even be killed is left alone, and no second one is sent after it.
"""

from __future__ import annotations

import io
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from node_agent.collectors import HardwareUnknown, Readings, ResetFailed, fabric, host, nvidia_smi
from node_agent.log import log
from node_agent.threads import start_thread
from node_agent.wire import GpuInfo, GpuReading, Id, Inventory, PortReading

COMMAND = [sys.executable, "-m", "node_agent.collectors.nvml"]
PERIOD_S = 1.0
#: The first answer loads the driver where it is not kept loaded.
FIRST_DEADLINE_S = 30.0
DEADLINE_S = 5.0
#: The cards are listed anew this often: one may fall off the bus.
LIST_PERIOD_S = 30.0
#: An answer older than this is no reading any more.
STALE_S = 10.0
#: How long a killed child may take to go before it counts as hanging in the kernel.
KILL_WAIT_S = 1.0

#: NVML_VALUE_TYPE_UNSIGNED_LONG, _UNSIGNED_LONG_LONG and _SIGNED_LONG_LONG.
_LONG = (2, 3, 4)

Lines = list[dict[str, Any]]
T = TypeVar("T")


class NoAnswer(Exception):
    """The child did not answer in time, or died. `card`: the one it was asking, "" if unknown."""

    def __init__(self, reason: str, card: str = "") -> None:
        super().__init__(reason)
        self.card = card


def look_once() -> tuple[Inventory, Readings]:
    """Ask now and wait for the answer. Raises HardwareUnknown."""
    child = NvmlProcess(COMMAND)
    try:
        inventory = _inventory(child.ask("inventory", FIRST_DEADLINE_S), [])
        return inventory, _readings(child.ask("readings", DEADLINE_S), inventory.gpus)
    except NoAnswer as error:
        raise HardwareUnknown(f"NVML: {error}") from error
    finally:
        child.kill()


class NvmlHardware:
    """The last known state of the cards, kept fresh by a thread."""

    def __init__(self, reset_tool: Path) -> None:
        self._reset_tool = reset_tool
        nvidia_smi.end_left_over(reset_tool)
        self._child = NvmlProcess(COMMAND)
        self._asking = threading.Lock()
        self._changed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inventory: Inventory | None = None
        self._why = "NVML has not answered yet"
        self._readings = Readings()
        self._read_at = 0.0
        self._listed_at = 0.0
        self._reset_since: frozenset[str] = frozenset()  # cards, since they were listed
        self._closed = threading.Event()
        self._ports = fabric.Ports(self._closed)
        start_thread("nvml", self._keep_fresh)

    def inventory(self) -> Inventory:
        if self._inventory is None:
            raise HardwareUnknown(self._why)
        return self._inventory

    def readings(self) -> Readings:
        with suppress(BlockingIOError):  # nothing has changed since the last call
            os.eventfd_read(self._changed)
        if self._readings.values and time.monotonic() - self._read_at > STALE_S:
            return Readings(unreadable=self._readings.unreadable)
        return self._readings

    def ports(self) -> list[PortReading]:
        return self._ports.latest()

    def change_fd(self) -> int | None:
        return self._changed

    def reset(self, uuids: list[str]) -> list[str]:
        """Reset cards by nvidia-smi, while no process of the agent holds a card open.

        Returns the UUIDs that were reset: `uuids`, or those of all listed cards if none is named.
        Raises ResetFailed for a UUID that is not fitted, if nvidia-smi fails, or if the process
        that reads NVML cannot be killed. Raises HardwareUnknown if the cards were never listed.
        """
        fitted = [gpu.uuid for gpu in self.inventory().gpus]
        strange = [uuid for uuid in uuids if uuid not in fitted]
        if strange:
            raise ResetFailed(f"no card {strange[0]} is fitted: name one of this node's")
        wanted = uuids or fitted
        try:
            with self.let_go():
                nvidia_smi.reset(self._reset_tool, wanted)
                self._reset_since = frozenset(wanted)
        except HardwareUnknown as error:
            raise ResetFailed(f"{error}: reboot the node") from error
        return wanted

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """Keep the process that reads NVML away within the context, so that no card is held open.

        No reading is taken meanwhile; afterwards the cards are listed anew. Entering kills that
        process, and raises HardwareUnknown if it hangs in the kernel and cannot be killed.
        """
        with self._asking:
            # A process that reads a card's sensors keeps it open.
            self._child.kill()
            try:
                self._child.wait_for_its_end()
            except NoAnswer as error:
                raise HardwareUnknown(str(error)) from error
            try:
                yield
            finally:
                self._listed_at = 0.0

    def close(self) -> None:
        self._closed.set()
        self._child.kill()

    def _keep_fresh(self) -> None:
        pause = 0.1
        while not self._closed.wait(pause):
            pause = PERIOD_S
            before = (self._inventory, self._readings.unreadable.keys())
            try:
                with self._asking:
                    self._ask()
            except NoAnswer as error:
                if self._closed.is_set():
                    return
                log("nvml_no_answer", "error", error=str(error), card=error.card)
                self._why = f"NVML: {error}"
                self._readings = Readings(unreadable={error.card: str(error)})
                pause = DEADLINE_S
            if before != (self._inventory, self._readings.unreadable.keys()):
                os.eventfd_write(self._changed, 1)

    def _ask(self) -> None:
        """Raises NoAnswer."""
        inventory = self._inventory
        if time.monotonic() - self._listed_at > LIST_PERIOD_S or inventory is None:
            # After a reset a card answers for itself, or is missing.
            before = [] if inventory is None else inventory.gpus
            before = [gpu for gpu in before if gpu.uuid not in self._reset_since]
            inventory = _inventory(self._child.ask("inventory", FIRST_DEADLINE_S), before)
            self._inventory, self._listed_at = inventory, time.monotonic()
            self._reset_since = frozenset()
        self._readings = _readings(self._child.ask("readings", DEADLINE_S), inventory.gpus)
        self._read_at = time.monotonic()


class NvmlProcess:
    """The process that may block. Starts when first asked, and again after it was killed."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._open: tuple[io.FileIO, io.FileIO]
        self._killed = False

    def ask(self, question: str, deadline_s: float) -> Lines:
        """All lines of one answer. Raises NoAnswer, and the child is killed."""
        questions, answers = self._pipes()
        answer: Lines = []
        try:
            questions.write(question.encode() + b"\n")
            for line in _lines(answers.fileno(), time.monotonic() + deadline_s):
                if line.get("end"):
                    if "error" in line:
                        raise NoAnswer(str(line["error"]))
                    return answer
                answer.append(line)
        except (OSError, ValueError) as error:
            answer.append({"error": str(error)})
        self.kill()
        asked = [line["card"] for line in answer if "card" in line]
        raise NoAnswer(f"no answer to {question} in {deadline_s:g} s", asked[-1] if asked else "")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._killed = True

    def wait_for_its_end(self) -> None:
        """Return once a killed process is gone. Raises NoAnswer if it cannot even be killed."""
        if self._process is not None and self._killed:
            try:
                self._process.wait(KILL_WAIT_S)
            except subprocess.TimeoutExpired as error:
                raise NoAnswer("the process that reads NVML hangs in the kernel") from error

    def _pipes(self) -> tuple[io.FileIO, io.FileIO]:
        """Where a living child takes questions and gives answers."""
        self.wait_for_its_end()
        if self._process is None or self._process.poll() is not None:
            questions, asker = _pipe()
            answerer, answers = _pipe()
            with questions, answers:
                self._process = subprocess.Popen(self._command, stdin=questions, stdout=answers)
            self._open = (asker, answerer)
            self._killed = False
        return self._open


def _pipe() -> tuple[io.FileIO, io.FileIO]:
    """The end to read from and the end to write to, unbuffered."""
    read, write = os.pipe()
    return io.FileIO(read, "r"), io.FileIO(write, "w")


def _lines(fd: int, deadline: float) -> Iterator[dict[str, Any]]:
    """JSON lines until the deadline, or until the child closes its end."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            block = os.read(fd, 65536)
            if not block:
                return
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                yield json.loads(line)


def _inventory(lines: Lines, before: list[GpuInfo]) -> Inventory:
    """`before`: the cards as they were listed last. One that is lost since stays what it was, for
    it is still fitted; one that was lost before it was ever listed is not there. Raises NoAnswer.
    """
    known = {gpu.uuid: msgspec.to_builtins(gpu) for gpu in before}
    told = [line["gpu"] for line in lines if "gpu" in line]
    listed = [
        _converted({**_untold(card["uuid"]), **known.get(card["uuid"], {}), **card}, GpuInfo)
        for card in told
    ]
    silent = {line["silent"] for line in lines if "silent" in line}
    kept = [
        gpu
        for gpu in before
        if gpu.index in silent and gpu.uuid not in {card.uuid for card in listed}
    ]
    driver = next((line["driver"] for line in lines if "driver" in line), "")
    return Inventory(
        gpus=sorted([*listed, *kept], key=lambda gpu: gpu.index),
        cpus=host.cpus(),
        memory_bytes=host.memory_bytes(),
        kernel=host.kernel(),
        driver_version=driver,
    )


def _untold(uuid: str) -> dict[str, Any]:
    """Consumer cards have no serial; the UUID is then the only name they have."""
    return {"serial": uuid, "model": "", "pci_address": "", "memory_bytes": 0}


def _readings(lines: Lines, listed: list[GpuInfo]) -> Readings:
    """`listed` names cards of which only the index is left. Raises NoAnswer."""
    values = [_converted(line["reading"], GpuReading) for line in lines if "reading" in line]
    names = {gpu.index: gpu.uuid for gpu in listed}
    silent = {
        line["unreadable"] or names.get(line["index"], ""): line["why"]
        for line in lines
        if "unreadable" in line
    }
    return Readings(values, silent)


def _converted(told: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(told, kind)
    except msgspec.ValidationError as error:
        raise NoAnswer(f"{told}: {error}") from error


# --- in the child -----------------------------------------------------------------------------


def _serve() -> None:
    """Answer questions from stdin, line by line, until it is closed."""
    import pynvml

    for question in sys.stdin:
        try:
            pynvml.nvmlInit()
            _list(pynvml) if question.strip() == "inventory" else _read(pynvml)
        except pynvml.NVMLError as error:
            _say({"end": True, "error": str(error)})
        else:
            _say({"end": True})


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _list(nvml: Any) -> None:
    _say({"driver": nvml.nvmlSystemGetDriverVersion()})
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            card = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(card)
        except nvml.NVMLError:  # this one is lost, and says nothing of the others
            _say({"silent": index})
            continue
        _say({"card": uuid})
        _say({"gpu": {"index": index, "uuid": uuid, **_describe(nvml, card)}})


def _describe(nvml: Any, card: Any) -> dict[str, Any]:
    """What the card tells of itself: one that is lost may tell nothing more."""
    told = {
        "serial": _if_known(nvml, lambda: _serial(nvml, card)),
        "model": _if_known(nvml, lambda: nvml.nvmlDeviceGetName(card)),
        "pci_address": _if_known(nvml, lambda: nvml.nvmlDeviceGetPciInfo(card).busId),
        "memory_bytes": _if_known(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(card).total),
    }
    return {name: value for name, value in told.items() if value is not None}


def _serial(nvml: Any, card: Any) -> str | None:
    """None where it names nothing: it may be "N/A", or memory that nobody has written."""
    try:
        serial = str(nvml.nvmlDeviceGetSerial(card)).strip()
        msgspec.convert(serial, Id)
    except (msgspec.ValidationError, UnicodeDecodeError):
        return None
    return serial


def _read(nvml: Any) -> None:
    for index in range(nvml.nvmlDeviceGetCount()):
        uuid = ""
        try:
            card = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(card)
            _say({"card": uuid})
            _say({"reading": {"uuid": uuid, **_sensors(nvml, card)}})
        except nvml.NVMLError as error:
            _say({"unreadable": uuid, "index": index, "why": f"card {index}: {error}"})


def _sensors(nvml: Any, card: Any) -> dict[str, float | None]:
    """Raises NVMLError if the card does not answer at all; a sensor it lacks is None."""
    volatile = nvml.NVML_VOLATILE_ECC

    def ecc(kind: int) -> Any:
        return _or_none(nvml, lambda: nvml.nvmlDeviceGetTotalEccErrors(card, kind, volatile))

    remapped = _if_known(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(card))
    temperature = nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)
    milliwatts = _or_none(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(card))
    return {
        "temperature_c": temperature,
        "power_w": None if milliwatts is None else milliwatts / 1000,
        "utilization": _or_none(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(card).gpu),
        "sm_clock_mhz": _or_none(
            nvml, lambda: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM)
        ),
        "memory_used_bytes": _or_none(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(card).used),
        "ecc_corrected": ecc(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        "ecc_uncorrected": ecc(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        "pcie_replays": _or_none(nvml, lambda: nvml.nvmlDeviceGetPcieReplayCounter(card)),
        "remap_pending": None if remapped is None else remapped[2],
        "remap_failed": None if remapped is None else remapped[3],
        "sram_over_threshold": _if_known(nvml, lambda: _sram_over_threshold(nvml, card)),
        "recovery_action": _if_known(
            nvml, lambda: _fields(nvml, card, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        ),
        "remapped_rows": None if remapped is None else remapped[1],
        "exhausted_banks": _if_known(
            nvml, lambda: nvml.nvmlDeviceGetRowRemapperHistogram(card).none
        ),
        "slowdown_c": _if_known(
            nvml,
            lambda: nvml.nvmlDeviceGetTemperatureThreshold(
                card, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
            ),
        ),
        "throttle_reasons": _if_known(
            nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card)
        ),
        "nvlink_mb_s": _if_known(nvml, lambda: _nvlink_mb_s(nvml, card)),
        "nvlink_errors": _if_known(nvml, lambda: _nvlink_errors(nvml, card)),
        "pcie_lanes": _if_known(nvml, lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(card)),
        "pcie_lanes_max": _if_known(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(card)),
    }


def _nvlink_mb_s(nvml: Any, card: Any) -> int | None:
    """None if the card has no NVLink, is cut into instances, which use none, or does not tell how
    fast one of its links is."""
    if _if_known(nvml, lambda: nvml.nvmlDeviceGetMigMode(card)[0]):
        return None
    speeds: list[int | None] = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active = nvml.nvmlDeviceGetNvLinkState(card, link)
        except nvml.NVMLError:  # the card has no such link
            continue
        field = (nvml.NVML_FI_DEV_NVLINK_GET_SPEED, link)
        speeds.append(_fields(nvml, card, [field]) if active else 0)
    known = [speed for speed in speeds if speed is not None]
    return sum(known) if known and len(known) == len(speeds) else None


def _nvlink_errors(nvml: Any, card: Any) -> int | None:
    return _fields(
        nvml,
        card,
        [
            nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
            nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
        ],
    )


def _fields(nvml: Any, card: Any, names: list[Any]) -> int | None:
    """The sum of these field values; None where one cannot be read."""
    found = nvml.nvmlDeviceGetFieldValues(card, names)
    if any(one.nvmlReturn != 0 for one in found):
        return None
    # Which member of the union holds it the driver says; all of them are whole numbers here.
    return sum(
        int(one.value.ullVal if one.valueType in _LONG else one.value.uiVal) for one in found
    )


def _sram_over_threshold(nvml: Any, card: Any) -> int:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    status.version = nvml.nvmlEccSramErrorStatus_v1
    nvml.nvmlDeviceGetSramEccErrorStatus(card, nvml.byref(status))
    return int(bool(status.bThresholdExceeded))


def _if_known(nvml: Any, read: Callable[[], Any]) -> Any:
    """What not every driver, or binding, knows: that it does not says nothing of the card."""
    try:
        return read()
    except (nvml.NVMLError, AttributeError):
        return None


def _or_none(nvml: Any, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except nvml.NVMLError_NotSupported:
        return None


if __name__ == "__main__":
    _serve()
