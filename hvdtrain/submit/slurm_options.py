"""`SlurmOptions`: what the user asks of `hvdtrain slurm`, with the defaults."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import ConfigError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MEMORY = re.compile(r"\d+[KMGT]?B?", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Slurm's six: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S
_TIME = re.compile(r"(?:(?P<days>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+))?(?::(?P<ds>\d+))?"
                   r"|(?:(?P<h>\d+):)?(?P<m>\d+):(?P<s>\d+)|(?P<minutes>\d+))")
_LARGEST_SIGNAL_S = 65535
_TEXTS = ("partition", "account", "qos", "constraint", "job_name", "output", "program")


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """Validated when made. The names are those of sbatch where it has one."""

    nodes: int = 1
    ntasks: int | None = None
    """Ranks in all."""
    ntasks_per_node: int | None = None
    """Ranks on each node. Default: one per GPU."""
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    """Processors of each rank; also its OMP_NUM_THREADS."""
    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    job_name: str | None = None
    """Default: the name of the job file."""
    output: str | None = None
    """Slurm's log file, a pattern. Default: Slurm's, `slurm-%j.out`."""
    modules: tuple[str, ...] = ()
    """Environment modules to load."""
    env: tuple[str, ...] = ()
    """`VAR=VALUE`, or `VAR` for a variable that must be set where the job is submitted."""
    venv: Path | None = None
    """A virtual environment to activate. Default: none; the Python that runs is named."""
    program: str | None = None
    """The program that is hvdtrain. Default: `-m hvdtrain` of the Python that runs."""
    signal_before_s: int = 120
    """So many seconds before the time limit the ranks are told to stop; 0: they are not."""
    requeue: bool = True
    """Whether a job that was stopped or preempted goes on by itself."""
    max_requeues: int = 50
    wait_s: int | None = None
    """From the end of the first rank to the end of all; 0: no limit. Default: 30 for `fit`; a
    program is ended when a rank of it fails."""
    extra: tuple[str, ...] = ()
    """Further options of sbatch, as they stand after `#SBATCH`."""

    def __post_init__(self) -> None:
        """Check each value, and that there is a number of ranks.

        Raises:
            ConfigError: A value is out of range, or cannot stand in a batch script.
        """
        self._check_numbers()
        self._check_texts()
        self._check_ranks()
        self._check_time()

    @property
    def ranks_per_node(self) -> int | None:
        """`--ntasks-per-node`: as given, else one per GPU where `--ntasks` says nothing."""
        if self.ntasks_per_node is None and self.ntasks is None:
            return self.gpus_per_node
        return self.ntasks_per_node

    def _check_numbers(self) -> None:
        for name, least in (("nodes", 1), ("ntasks", 1), ("ntasks_per_node", 1),
                            ("gpus_per_node", 1), ("cpus_per_task", 1), ("signal_before_s", 0),
                            ("max_requeues", 0), ("wait_s", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{_option(name)} is {value}. Expected {least} or more.")
        if self.signal_before_s > _LARGEST_SIGNAL_S:
            raise ConfigError(f"--signal-before is {self.signal_before_s} s. Slurm takes at most "
                              f"{_LARGEST_SIGNAL_S}.")

    def _check_texts(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None:
                _check_text(_option(name), value)
        for module in self.modules:
            _check_text("--module", module)
        if self.mem is not None and _MEMORY.fullmatch(self.mem) is None:
            raise ConfigError(f"--mem is {self.mem!r}. Expected a whole number with an optional "
                              "K, M, G or T, e.g. 64G (Slurm takes no fractions).")
        for item in self.env:
            check_variable(item)
        for raw in self.extra:
            _check_extra(raw)

    def _check_ranks(self) -> None:
        if self.ntasks is None and self.ranks_per_node is None:
            raise ConfigError("The number of ranks is not given. Expected one of: "
                              "--ntasks-per-node N, --ntasks N, --gpus-per-node N (one rank each).")
        if self.ntasks is not None and self.ntasks < self.nodes:
            raise ConfigError(f"{self.ntasks} ranks (--ntasks) cannot use {self.nodes} nodes "
                              "(--nodes). Expected at least one rank for each node.")
        per_node = self.ranks_per_node
        if self.ntasks is not None and per_node is not None and self.ntasks > self.nodes * per_node:
            raise ConfigError(
                f"--ntasks is {self.ntasks}, but {self.nodes} nodes with {per_node} ranks each "
                f"have place for {self.nodes * per_node}. Correct one of --nodes, --ntasks and "
                "--ntasks-per-node.")
        if self.gpus_per_node is not None and (per_node or 0) > self.gpus_per_node:
            raise ConfigError(
                f"{per_node} ranks on each node have {self.gpus_per_node} GPUs (--gpus-per-node). "
                "Each rank needs one of its own: give as many GPUs, or fewer ranks.")

    def _check_time(self) -> None:
        if self.time is None:
            return
        limit_s = time_limit_s(self.time)
        # Slurm may send the signal up to a minute early.
        if self.signal_before_s and 0 < limit_s <= self.signal_before_s + 60:
            raise ConfigError(
                f"--time {self.time} is {limit_s} s, and the ranks are told to stop "
                f"{self.signal_before_s} s before (Slurm: up to 60 s earlier), so nothing would be "
                "trained. Give a longer --time or a smaller --signal-before.")


def time_limit_s(text: str) -> int:
    """A time limit in one of Slurm's six forms, in seconds; 0 means no limit.

    Raises:
        ConfigError: It is in none of them.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--time is {text!r}. Expected one of Slurm's forms: MINUTES, MINUTES:SECONDS, "
            "HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES, DAYS-HOURS:MINUTES:SECONDS.")
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    return (part["days"] * 86400 + (part["dh"] + part["h"]) * 3600
            + (part["dm"] + part["m"] + part["minutes"]) * 60 + part["ds"] + part["s"])


def check_variable(item: str) -> None:
    """Check a value of `--env`.

    Raises:
        ConfigError: It does not begin with the name of a variable, or holds a NUL.
    """
    name = item.partition("=")[0]
    if _VARIABLE.fullmatch(name) is None or "\0" in item:
        raise ConfigError(f"--env is {item!r}. Expected VAR or VAR=VALUE, where VAR consists of "
                          "letters, digits and _ and does not begin with a digit.")


def _option(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")


def _check_text(option: str, value: str) -> None:
    if not value or _CONTROL.search(value):
        raise ConfigError(f"{option} is {value!r}. Expected text without line breaks and other "
                          "control characters.")
    if value.startswith("-"):
        raise ConfigError(f"{option} is {value!r}, which looks like another option.")


def _check_extra(raw: str) -> None:
    if not raw.startswith("--") or _CONTROL.search(raw):
        raise ConfigError(f"--extra is {raw!r}. Expected one line that begins with --, e.g. "
                          '--extra "--exclusive".')
    try:
        shlex.split(raw)
    except ValueError as error:
        raise ConfigError(f"--extra is {raw!r}: {error}. Slurm would refuse the script.") from None
