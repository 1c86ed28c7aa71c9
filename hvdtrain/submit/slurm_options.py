"""`SlurmOptions`: what the user asks of `hvdtrain slurm`, with the defaults."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import ConfigError
from hvdtrain.settings import setting

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

    nodes: int = setting(1, "Hosts.", option="--nodes,-N")
    ntasks: int | None = setting(None, "Ranks in all.", option="--ntasks,-n")
    ntasks_per_node: int | None = setting(None, "Ranks on each host.", unset="one per GPU")
    gpus_per_node: int | None = setting(None, "GPUs of each host.")
    cpus_per_task: int | None = setting(
        None, "Processors of each rank; also its OMP_NUM_THREADS.", option="--cpus-per-task,-c")
    mem: str | None = setting(None, "Memory of each host, as in 64G.")
    time: str | None = setting(None, "Time limit, as in 12:00:00 or 1-12.", option="--time,-t")
    partition: str | None = setting(None, "As in sbatch.", option="--partition,-p")
    account: str | None = setting(None, "As in sbatch.", option="--account,-A")
    qos: str | None = setting(None, "As in sbatch.", option="--qos,-q")
    constraint: str | None = setting(None, "As in sbatch.", option="--constraint,-C")
    job_name: str | None = setting(
        None, "Name of the job.", option="--job-name,-J", unset="the name of the job file")
    output: str | None = setting(
        None, "Slurm's log file, a pattern.", option="--output,-o", unset="slurm-%j.out")
    modules: tuple[str, ...] = setting(
        (), "An environment module to load; repeatable.", option="--module")
    env: tuple[str, ...] = setting(
        (), "A variable for the ranks; repeatable. One without a value must be set where the job "
        "is submitted.", option="--env,-x", metavar="VAR[=VALUE]")
    venv: Path | None = setting(
        None, "A virtual environment to activate.", unset="none; this Python is named")
    program: str | None = setting(
        None, "The hvdtrain to start, such as `hvdtrain` for that on PATH.", unset="this one")
    signal_before_s: int = setting(
        120, "Tell the ranks to stop so long before the time limit; 0: do not.",
        metavar="SECONDS")
    requeue: bool = setting(True, "Go on by itself after a stop and after a preemption.")
    max_requeues: int = setting(50, "So often at most.")
    wait_s: int | None = setting(
        None, "From the end of the first rank to the end of all; 0: no limit. A program is ended "
        "when a rank of it fails.", metavar="SECONDS", unset="30 for fit")
    extra: tuple[str, ...] = setting(
        (), "One more option of sbatch, as in \"--exclusive\"; repeatable.")

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
