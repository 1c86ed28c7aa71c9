"""What the user asks of `hvdtrain launch`: its options, and what each rank runs."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from hvdtrain.collective_names import CollectiveName
from hvdtrain.errors import ConfigError, LaunchError
from hvdtrain.hosts import Host, parse_hosts, read_hostfile
from hvdtrain.settings import check, setting, table
from hvdtrain.world.network import check_wanted

STARTERS = tuple(sorted(module.name for module in pkgutil.iter_modules(
    [str(Path(__file__).with_name("starters"))]) if module.name != "base"))
"""The modules of `starters/`: one that is added is known by its name."""
if TYPE_CHECKING:
    StarterName = str
else:
    StarterName = Literal["auto", *STARTERS]
RANK_COMMANDS = ("fit", "run", "world")


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """How to reach other hosts; what is not given comes from the user's ssh_config."""

    port: int | None = setting(
        None, "Port of ssh on the other hosts.", option="--ssh-port", unset="ssh's own")
    identity_file: Path | None = setting(
        None, "Private key for ssh.", option="--ssh-identity-file", unset="ssh's own")

    def __post_init__(self) -> None:
        if self.port is not None and not 0 < self.port < 65536:
            raise ConfigError(f"--ssh-port is {self.port}. Expected 1 to 65535.")


@dataclass(frozen=True, kw_only=True)
class HostsOptions:
    """Which hosts, and how to reach them."""

    hosts: str | None = setting(
        None, "Hosts and how many ranks each takes.", option="-H,--hosts",
        metavar="HOST:SLOTS,...", unset="the Slurm job, the MPIJob, or this host")
    hostfile: Path | None = setting(
        None, "Hosts from a file in the way of Open MPI or MPICH, in place of `--hosts`.")
    remote: RemoteOptions = table(RemoteOptions, "How other hosts are reached.")
    network_interface: tuple[str, ...] = setting(
        (), "Network of the ranks, by name of the interface or by address, looked up on each host; "
        "the first that a host has counts.", metavar="NAME|CIDR,...", commas=True,
        unset="the way to the other hosts")

    def __post_init__(self) -> None:
        if self.hosts is not None and self.hostfile is not None:
            raise ConfigError("Both -H and --hostfile are given. Expected one of them.")
        check_wanted(self.network_interface)

    @property
    def names_hosts(self) -> bool:
        """Whether `-H` or `--hostfile` is given."""
        return self.hosts is not None or self.hostfile is not None

    def read_hosts(self) -> tuple[Host, ...]:
        """The hosts that were named; empty if none were."""
        if self.hostfile is not None:
            return read_hostfile(self.hostfile)
        return parse_hosts(self.hosts) if self.hosts is not None else ()


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """A job whose ranks and hosts come and go; elastic if one of its options is given."""

    min_np: int | None = setting(
        None, "Fewest ranks with which the job goes on when some are lost.",
        option="--min-np", metavar="N", unset="1", least=1)
    max_np: int | None = setting(
        None, "Most ranks.", option="--max-np", metavar="N", unset="-np, else all slots", least=1)
    host_discovery_script: Path | None = setting(
        None, "A program that prints the hosts of now, as lines `HOST:SLOTS`.",
        option="--host-discovery-script", metavar="PROGRAM")
    watch: bool = setting(
        False, "Read `--hostfile` again when it changes.", option="--watch")
    timeout_s: float = setting(
        600.0, "How long to wait for hosts while there are fewer than `--min-np` ranks.",
        option="--elastic-timeout", metavar="SECONDS", least=0)

    @property
    def is_on(self) -> bool:
        """Whether the job is elastic."""
        return (self.min_np or self.max_np or self.host_discovery_script) is not None or self.watch

    def __post_init__(self) -> None:
        check(self)
        if self.min_np is not None and self.max_np is not None and self.min_np > self.max_np:
            raise ConfigError(f"--min-np is {self.min_np} and --max-np {self.max_np}. Expected a "
                              "minimum that is not above the maximum.")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(HostsOptions):
    """Validated when made. `command` is the program of each rank with its arguments."""

    command: tuple[str, ...]
    np: int | None = setting(
        None, "Number of ranks.", option="-np,--np", unset="all slots of -H")
    start_timeout_s: float | None = setting(
        None, "How long to wait for hosts that cannot be reached.", metavar="SECONDS",
        unset="0; in an MPIJob 300", least=0)
    ssh_fanout: int | None = setting(
        None, "Reach other hosts by a tree of ssh, with so many logins from each host.",
        option="--ssh-fanout", metavar="N", unset="all from here", least=2)
    elastic: ElasticOptions = table(ElasticOptions, "Ranks and hosts that come and go.")
    starter: StarterName = setting(
        "auto", f"What creates the processes: {', '.join(('auto', *STARTERS))}.")
    collective: CollectiveName = setting(
        "auto", f"What moves the bytes: {', '.join(get_args(CollectiveName))}.")
    env: tuple[str, ...] = setting(
        (), "A variable for the ranks; repeatable.", option="--env,-x", metavar="VAR[=VALUE]")
    output: Path | None = setting(None, "Directory for one log file per rank.")
    timeout_s: float | None = setting(
        None, "Limit for the whole job.", option="--timeout,--timeout-s", metavar="SECONDS",
        least=0)
    grace_s: float = setting(
        15.0, "From SIGTERM to SIGKILL when the job is told to stop. After a failure at most 5.",
        metavar="SECONDS", least=0)
    preload: bool = setting(
        False, "Import TensorFlow once per host and fork the ranks from there.",
        option="--preload")
    verbose: bool = setting(
        False, "Show the plan, and the output of every rank.", option="--verbose,-v")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.command:
            raise ConfigError("There is nothing to start. Expected: hvdtrain launch -np N fit JOB")
        check(self)
        self._check_elastic()
        for item in self.env:
            name = item.partition("=")[0]
            if not name or "\0" in item:
                raise ConfigError(f"--env is {item!r}. Expected VAR or VAR=VALUE.")


    def _check_elastic(self) -> None:
        elastic = self.elastic
        if elastic.watch and self.hostfile is None:
            raise ConfigError("--watch reads the hostfile again, and there is none. Add --hostfile "
                              "FILE.")
        if elastic.host_discovery_script is not None and self.names_hosts:
            raise ConfigError("The hosts are named, and a --host-discovery-script is given. "
                              "Expected one of them.")
        if elastic.is_on and self.starter not in ("auto", "native"):
            raise ConfigError(f"An elastic job is started by hvdtrain's own starter, not by "
                              f"{self.starter}. Leave --starter out.")
        if elastic.is_on and self.ssh_fanout is not None:
            raise ConfigError("--ssh-fanout reaches hosts by way of others, which an elastic job "
                              "may lose. Leave it out.")
        most = elastic.max_np if self.np is None else min(self.np, elastic.max_np or self.np)
        if elastic.min_np is not None and most is not None and elastic.min_np > most:
            raise ConfigError(f"--min-np is {elastic.min_np}, but at most {most} ranks are asked "
                              "for. Lower it, or raise -np or --max-np.")


def given_variables(items: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `--env`; LaunchError for one without a value that is not set here."""
    env = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals and name not in environ:
            raise LaunchError(f"--env {name}: the variable is not set here. Expected {name}=VALUE, "
                              "or a variable that is set.")
        env[name] = value if equals else environ[name]
    return env


@dataclass(frozen=True, kw_only=True)
class RankCommand:
    """What each rank runs: an hvdtrain command such as `fit JOB`, or any program, as it is."""

    words: tuple[str, ...]
    is_program: bool = True

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line with this hvdtrain."""
        return self.words if self.is_program else (sys.executable, "-m", "hvdtrain", *self.words)

    @property
    def own_words(self) -> tuple[str, ...]:
        """The words after `hvdtrain`, also where it was given as a program; else empty."""
        words = list(self.words)
        if not self.is_program:
            return self.words
        if words and Path(words[0]).name == "hvdtrain":
            return self.words[1:]
        at = words.index("-m", 1) if "-m" in words[1:] else len(words)
        options_only = all(word.startswith("-") for word in words[1:at])
        return tuple(words[at + 2:]) if options_only and words[at + 1:at + 2] == [
            "hvdtrain"] else ()

    @property
    def is_fit(self) -> bool:
        """Whether it is a training, which stops on request, resumes, and says when it is done."""
        return self.own_words[:1] == ("fit",) and not {"-h", "--help"} & set(self.own_words)

    @property
    def can_take_resume(self) -> bool:
        """Whether `--resume` may be added: a `fit` that does not have it."""
        return self.is_fit and "--resume" not in self.words

    @property
    def name(self) -> str:
        """A short name for the job: that of the file or module."""
        words = self.own_words or self.words
        named = [word for word in words[1:] if not word.startswith("-")]
        word = named[0] if named and not words[0].startswith("-") else words[0]
        return Path(word).stem or "job"

    def with_words(self, *words: str) -> RankCommand:
        """With more words at the end."""
        return replace(self, words=(*self.words, *words))

    def without(self, word: str) -> RankCommand:
        """Without one of its words."""
        return replace(self, words=tuple(w for w in self.words if w != word))


def split_command(words: Sequence[str], what: str) -> RankCommand:
    """Tell `fit JOB` and `-- fit JOB` from `-- python train.py`; LaunchError for none of them.

    `words` follow the options, with their `--` doubled as by `RanksCommand`; `what` names the
    command in messages.
    """
    words, after_dashes = list(words), list(words[:1]) == ["--"]
    if "--" in words:  # the one that was added; before a program also the one that was typed
        words.remove("--")
    if not words:
        raise LaunchError(f"There is nothing to start. Expected: {what} [options] -- fit JOB")
    if words[0] in RANK_COMMANDS:
        return RankCommand(words=tuple(words), is_program=False)
    if not after_dashes:
        raise LaunchError(
            f"{words[0]!r} is not a command of the ranks. Expected one of: "
            f"{', '.join(RANK_COMMANDS)}; or -- and a program: {what} [options] -- "
            f"{' '.join(words)}")
    return RankCommand(words=tuple(words))
