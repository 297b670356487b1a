"""The agent's settings: one TOML file, read once at the start. Never guesses at a misspelt key."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from node_agent.wire import GpuInfo, Name, RackName, Short

#: What stands for the card in the arguments of `field_diagnostic`.
CARD_NAMES = ("{pci}", "{uuid}", "{index}")
REPOSITORY = Path(__file__).resolve().parent.parent


class ConfigError(Exception):
    """The configuration cannot be used; the message names the file, the key and the remedy."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file's keys. Relative paths are taken from the folder of the file."""

    name: Name
    address: Short  # at which other nodes reach this one
    ingest_url: Short
    state_dir: Path
    shared_dir: Path  # checkpoint root; a rank's DRYDOCK_STATE_DIR is shared_dir/<job>
    #: checkpoints on this node's own disk; DRYDOCK_LOCAL_DIR of a rank
    local_dir: Path | None = None
    #: where ranks find the process that holds peers' checkpoints in this node's memory;
    #: DRYDOCK_HOLDER_DIR of a rank
    holder_dir: Path | None = None
    hardware: Literal["nvml", "simulated"]
    rack: RackName = ""
    switch: Short = ""  # that its fabric hangs on
    join_token_file: Path | None = None  # needed until the node is enrolled
    hardware_dir: Path | None = None  # simulated only: what the chassis writes
    #: default: /dev/kmsg, or kernel.log in hardware_dir; of real hardware it is a device
    kernel_log: Path | None = None
    boot_id_file: Path | None = None  # default: the kernel's, or boot_id in hardware_dir
    nvidia_smi: Path = Path("/usr/bin/nvidia-smi")  # what resets real cards
    #: The vendor's field diagnostic: argv, in which {pci}, {uuid} or {index} stands for the card.
    #: Exit status as NVIDIA's: 0 the card passed, 1 it is defective, anything else no verdict.
    field_diagnostic: list[str] = []
    workdir: Path = REPOSITORY  # ranks start here, and import `runtime` from here
    #: Allow-list: program name -> argv. A first item "python" means this interpreter.
    programs: dict[Name, list[str]] = {}
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def kernel_log_path(self) -> Path:
        return self.kernel_log or self._simulated("kernel.log") or Path("/dev/kmsg")

    @property
    def boot_id_path(self) -> Path:
        kernels_own = Path("/proc/sys/kernel/random/boot_id")
        return self.boot_id_file or self._simulated("boot_id") or kernels_own

    def argv(self, program: str) -> list[str]:
        """The command line of an allowed program. Raises KeyError for any other name."""
        return _with_our_python(self.programs[program])

    def field_diagnostic_argv(self, card: GpuInfo) -> list[str]:
        """The command line that examines this card."""
        domain, _, rest = card.pci_address.lower().partition(":")
        pci = f"{domain[-4:]}:{rest}"  # as sysfs names it; NVML's domain has eight digits
        names = {"{pci}": pci, "{uuid}": card.uuid, "{index}": str(card.index)}
        argv = _with_our_python(self.field_diagnostic)
        for name, value in names.items():
            argv = [word.replace(name, value) for word in argv]
        return argv

    def _simulated(self, name: str) -> Path | None:
        return self.hardware_dir / name if self.hardware_dir is not None else None


def load_config(path: Path) -> Config:
    """Read and check the file. Raises ConfigError."""
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    folder = path.resolve().parent

    def to_path(kind: type, value: Any) -> Any:
        if kind is Path and isinstance(value, str):
            return folder / Path(value).expanduser()
        raise ValueError(f"expected text, got {value!r}")

    try:
        config = msgspec.convert(raw, Config, dec_hook=to_path)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    _check(path, config)
    return config


def _check(path: Path, config: Config) -> None:
    if not config.ingest_url.startswith(("http://", "https://")):
        raise ConfigError(f"{path}: `ingest_url` must start with http:// or https://")
    if config.hardware == "simulated" and config.hardware_dir is None:
        raise ConfigError(f"{path}: `hardware_dir` is needed when `hardware` is simulated")
    if config.hardware == "nvml" and config.kernel_log and not config.kernel_log.is_char_device():
        raise ConfigError(
            f"{path}: `kernel_log` must be the kernel's own device: the faults of a file would be"
            " told again after each boot. Leave it out for /dev/kmsg"
        )
    if config.field_diagnostic and not any(
        name in word for name in CARD_NAMES for word in config.field_diagnostic[1:]
    ):
        raise ConfigError(
            f"{path}: `field_diagnostic` must say which card it examines, or its verdict would be"
            f" of all: put one of {', '.join(CARD_NAMES)} into its arguments"
        )
    for name, argv in config.programs.items():
        if not argv or not argv[0]:
            raise ConfigError(f"{path}: `programs.{name}` needs at least the program to run")


def _with_our_python(argv: list[str]) -> list[str]:
    return [sys.executable, *argv[1:]] if argv[0] == "python" else list(argv)
