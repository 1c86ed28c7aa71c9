"""`hvdtrain slurm`: its options, the batch script (`slurm.sh.j2`), and sbatch.

Nothing that a user types reaches a shell unquoted. Lines that begin with #SBATCH are read by Slurm,
not a shell, and have Slurm's own quoting.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import hvdtrain
from hvdtrain.errors import (
    EXIT_NOT_STARTED,
    EXIT_STOPPED,
    EXIT_TIME_OVER,
    ConfigError,
    LaunchError,
    MachineError,
)
from hvdtrain.launch.options import RankCommand, given_variables
from hvdtrain.process import run_program
from hvdtrain.settings import check, setting

MARK = "# Made with hvdtrain "
_FIT_WAIT_S, _SBATCH_TIMEOUT_S = 30, 120
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MEMORY = re.compile(r"\d+[KMGT]?B?", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ANSI_C = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\", "'": "\\'"}
# Slurm's six: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S
_TIME = re.compile(r"(?:(?P<days>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+))?(?::(?P<ds>\d+))?"
                   r"|(?:(?P<h>\d+):)?(?P<m>\d+):(?P<s>\d+)|(?P<minutes>\d+))")
_UNITS_S = {"days": 86400, "dh": 3600, "h": 3600, "dm": 60, "m": 60, "minutes": 60, "ds": 1, "s": 1}
_DIRECTIVES = ("job_name", "nodes", "ntasks", "ntasks_per_node", "gpus_per_node", "cpus_per_task",
               "mem", "time", "partition", "account", "qos", "constraint", "output", "open_mode")
_TEXTS = ("partition", "account", "qos", "constraint", "job_name", "output", "program")


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """Validated when made. Names are those of sbatch where it has one."""

    nodes: int = setting(1, "Hosts.", option="--nodes,-N", least=1)
    ntasks: int | None = setting(None, "Ranks in all.", option="--ntasks,-n", least=1)
    ntasks_per_node: int | None = setting(
        None, "Ranks on each host.", unset="one per GPU", least=1)
    gpus_per_node: int | None = setting(None, "GPUs of each host.", least=1)
    cpus_per_task: int | None = setting(
        None, "Processors of each rank; also its OMP_NUM_THREADS.", option="--cpus-per-task,-c",
        least=1)
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
        metavar="SECONDS", least=0, most=65535)
    elastic: bool = setting(
        False, "Go on with the nodes that remain when one is lost, and with those that come back "
        "(docs/elastic.md).", option="--elastic")
    min_np: int | None = setting(
        None, "With `--elastic`: fewest ranks with which the job goes on.", option="--min-np",
        metavar="N", unset="1", least=1)
    requeue: bool = setting(True, "Go on by itself after a stop and after a preemption.")
    max_requeues: int = setting(50, "So often at most.", least=0)
    wait_s: int | None = setting(
        None, "From the end of the first rank to the end of all; 0: no limit. A program is ended "
        "when a rank of it fails.", metavar="SECONDS", unset="30 for fit", least=0)
    extra: tuple[str, ...] = setting(
        (), "One more option of sbatch, as in \"--exclusive\"; repeatable.")

    def __post_init__(self) -> None:
        check(self)
        texts = [(f"--{name.replace('_', '-')}", getattr(self, name)) for name in _TEXTS]
        for option, value in texts + [("--module", module) for module in self.modules]:
            if value is not None and (not value or _CONTROL.search(value)):
                raise ConfigError(f"{option} is {value!r}. Expected text without line breaks and "
                                  "other control characters.")
            if value is not None and value.startswith("-"):
                raise ConfigError(f"{option} is {value!r}, which looks like another option.")
        if self.mem is not None and _MEMORY.fullmatch(self.mem) is None:
            raise ConfigError(f"--mem is {self.mem!r}. Expected a whole number with an optional "
                              "K, M, G or T, e.g. 64G (Slurm takes no fractions).")
        for item in self.env:
            check_variable(item)
        for raw in self.extra:
            if not raw.startswith("--") or _CONTROL.search(raw):
                raise ConfigError(f"--extra is {raw!r}. Expected one line that begins with --, "
                                  'e.g. --extra "--exclusive".')
            try:
                shlex.split(raw)
            except ValueError as error:
                raise ConfigError(f"--extra is {raw!r}: {error}. Slurm would refuse the "
                                  "script.") from None
        self._check_ranks()
        if self.min_np is not None and not self.elastic:
            raise ConfigError("--min-np is of an elastic job. Add --elastic, or leave it out.")
        limit_s = time_limit_s(self.time or "0")
        # Slurm may send the signal up to a minute early.
        if self.signal_before_s and 0 < limit_s <= self.signal_before_s + 60:
            raise ConfigError(
                f"--time {self.time} is {limit_s} s, and the ranks are told to stop "
                f"{self.signal_before_s} s before (Slurm: up to 60 s earlier), so nothing would be "
                "trained. Give a longer --time or a smaller --signal-before.")

    @property
    def ranks_per_node(self) -> int | None:
        """`--ntasks-per-node`: as given, else one per GPU where `--ntasks` says nothing."""
        if self.ntasks_per_node is None and self.ntasks is None:
            return self.gpus_per_node
        return self.ntasks_per_node

    def _check_ranks(self) -> None:
        nodes, ntasks, per_node = self.nodes, self.ntasks, self.ranks_per_node
        if ntasks is None and per_node is None:
            raise ConfigError("The number of ranks is not given. Expected one of: "
                              "--ntasks-per-node N, --ntasks N, --gpus-per-node N (one rank each).")
        if ntasks is not None and ntasks < nodes:
            raise ConfigError(f"{ntasks} ranks (--ntasks) cannot use {nodes} nodes (--nodes). "
                              "Expected at least one rank for each node.")
        if ntasks is not None and per_node is not None and ntasks > nodes * per_node:
            raise ConfigError(
                f"--ntasks is {ntasks}, but {nodes} nodes with {per_node} ranks each have place "
                f"for {nodes * per_node}. Correct one of --nodes, --ntasks and --ntasks-per-node.")
        if self.gpus_per_node is not None and (per_node or 0) > self.gpus_per_node:
            raise ConfigError(
                f"{per_node} ranks on each node have {self.gpus_per_node} GPUs (--gpus-per-node). "
                "Each rank needs one of its own: give as many GPUs, or fewer ranks.")


def make_script(options: SlurmOptions, command: RankCommand, *,
                made_by: Sequence[str] = ()) -> str:
    """Write the batch script; `made_by` are the arguments of `hvdtrain`, for its head."""
    import jinja2  # here, so that `hvdtrain --help` does not wait for them

    from hvdtrain.rendezvous.secret import SECRET_VARIABLE
    resumes = options.requeue and command.can_take_resume
    overwrites = resumes and "--overwrite" in command.words
    # `--overwrite` is for the first start only; later ones resume.
    rank = command.without("--overwrite") if overwrites else command
    own = (options.program,) if options.program is not None else (
        str(options.venv / "bin" / "python") if options.venv is not None else sys.executable,
        "-m", "hvdtrain")
    argv = rank.words if command.is_program else (*own, *rank.words)
    if options.elastic:
        argv = (*own, "launch", "--min-np", str(options.min_np or 1),
                *(["--"] if command.is_program else []), *rank.words)
    values = vars(options) | {
        "job_name": options.job_name or command.name, "ntasks_per_node": options.ranks_per_node,
        # Keep what the job wrote before it was requeued.
        "open_mode": "append" if options.requeue else None}
    directives = {name.replace("_", "-"): values[name] for name in _DIRECTIVES}
    variables = {name: value if equals else None
                 for name, equals, value in (item.partition("=") for item in options.env)}
    engine = jinja2.Environment(trim_blocks=True, lstrip_blocks=True,  # noqa: S701 - no HTML
                                keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    engine.filters["quote"] = quote
    template = Path(__file__).with_suffix(".sh.j2").read_text(encoding="utf-8")
    return engine.from_string(template).render(
        head=head(made_by), options=options, directives=directives, variables=variables,
        rank=argv, resumes=resumes, overwrites=overwrites,
        wait_s=_FIT_WAIT_S if options.wait_s is None and command.is_fit else options.wait_s,
        is_fit=command.is_fit, stopped=EXIT_STOPPED, secret=SECRET_VARIABLE, quote=quote,
        directive=directive)


def submit(script: str, file: Path | None, options: SlurmOptions,
           environ: Mapping[str, str]) -> str:
    """Give a script to sbatch, through standard input without a file; returns the job's number.

    MachineError without sbatch; LaunchError if a variable is not set or Slurm refuses the script.
    """
    given_variables(options.env, environ)  # sbatch passes them on
    sbatch = shutil.which("sbatch", path=environ.get("PATH"))
    if sbatch is None:
        raise MachineError("There is no sbatch on PATH. Submit on a login node of the cluster, or "
                           "write the script with --script FILE and submit it there.")
    done = run_program([sbatch, "--parsable", *([file.absolute()] if file else [])], env=environ,
                       limit_s=_SBATCH_TIMEOUT_S, text="" if file else script)
    if done.code in (EXIT_NOT_STARTED, EXIT_TIME_OVER):
        raise LaunchError(f"sbatch did not take the job: {done.last_line}. Does `sinfo` answer?")
    if done.code != 0:
        raise LaunchError(f"sbatch refused the job: {done.err.strip()}")
    # With several clusters it is NUMBER;CLUSTER.
    return done.out.strip().partition(";")[0]


def head(made_by: Sequence[str]) -> str:
    """The line that identifies a generated file."""
    by = f" by: hvdtrain {' '.join(map(quote, made_by))}" if made_by else ""
    return f"{MARK}{hvdtrain.__version__}{by}"


def quote(word: str) -> str:
    """A word for bash on one line, with any content."""
    if not _CONTROL.search(word):
        return shlex.quote(word)
    return "$'" + "".join(_ANSI_C.get(char) or (
        f"\\x{ord(char):02x}" if _CONTROL.match(char) else char) for char in word) + "'"


def directive(name: str, value: object) -> str:
    """A line for Slurm, which removes a backslash even within single quotes."""
    return f"#SBATCH --{name}={shlex.quote(str(value).replace(chr(92), chr(92) * 2))}"


def time_limit_s(text: str) -> int:
    """A time limit in one of Slurm's six forms, in seconds; 0 means no limit."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--time is {text!r}. Expected one of Slurm's forms: MINUTES, MINUTES:SECONDS, "
            "HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES, DAYS-HOURS:MINUTES:SECONDS.")
    return sum(_UNITS_S[name] * int(value or 0) for name, value in match.groupdict().items())


def check_variable(item: str) -> None:
    """Check a value of `--env`."""
    name = item.partition("=")[0]
    if _VARIABLE.fullmatch(name) is None or "\0" in item:
        raise ConfigError(f"--env is {item!r}. Expected VAR or VAR=VALUE, where VAR consists of "
                          "letters, digits and _ and does not begin with a digit.")
