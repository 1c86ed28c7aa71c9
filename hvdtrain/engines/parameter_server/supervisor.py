"""A rank of engine ps: finds its role and the others, and supervises the role's process.

It never loads TensorFlow. The first supervisor whose role has ended sets the rendezvous key `done`,
on which all others end theirs. A process that was killed is restarted at its address: the
coordinator gives a worker its work again, and the chief goes on from the last checkpoint if
parameters were lost. One that ended with its own error is not, since it would fail again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hvdtrain import log
from hvdtrain.config import TrainConfig, config_from_json, config_to_json
from hvdtrain.engines.parameter_server.child import Health
from hvdtrain.engines.parameter_server.roles import (
    ASSIGNMENT_VARIABLE,
    Addresses,
    Assignment,
    Role,
    plan_roles,
    tf_config_roles,
)
from hvdtrain.errors import (
    EXIT_PARAMETERS_LOST,
    EXIT_RUN_FAILED,
    EXIT_STOPPED,
    HvdtrainError,
    WorldError,
)
from hvdtrain.job import Job
from hvdtrain.preload.child import is_forked
from hvdtrain.preload.client import Process, start_program
from hvdtrain.process import StopFlag, signal_name
from hvdtrain.rendezvous.barrier import exchange, open_rendezvous
from hvdtrain.rendezvous.client import RendezvousClient, Wait
from hvdtrain.runtime.guard import Guard
from hvdtrain.runtime.watchdog import own_addresses
from hvdtrain.settings import refuse_differences, settings_of
from hvdtrain.world import World
from hvdtrain.world.network import interfaces

_SETTINGS_VARIABLE = "HVDTRAIN_PS_SETTINGS"  # JSON, for one that re-executes itself
_SCOPE = "hvdtrain.ps"
_FIRST_PORT, _LAST_PORT = 20000, 32000
"""Below Linux's ephemeral ports, which could be taken between choice and use."""
_NOT_INHERITED = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI_LOCAL", "HOROVOD_", "TF_CONFIG")
"""Set by a starter; the child is not one of its ranks."""
_POLL_S, _ASK_S = 0.05, 0.5
_END_S, _LAST_EVALUATION_S, _OTHERS_S, _CAUSE_S, _SILENCE_S = 5.0, 300.0, 5.0, 1.0, 10.0


class RoleLostError(HvdtrainError):
    """A role was lost more often than it may be started again."""

    exit_code = EXIT_RUN_FAILED


def fit_on_servers(job: Job, config: TrainConfig, world: World, guarded: Guard, *,
                   dry_run: bool) -> Any:
    """Train with parameter servers. All ranks, and again each role's process."""
    # A `RunResult` in the chief's process; None in a supervisor. Workers and servers do not return.
    own = os.environ.get(ASSIGNMENT_VARIABLE)
    if own or dry_run:
        from hvdtrain.engines.parameter_server.child import run_child
        assignment = Assignment.from_json(own) if own else _assign(config, world)[1]
        if dry_run and assignment.role.kind != "chief":
            return None
        return run_child(assignment, job, config, guarded, dry_run=dry_run)
    if "tensorflow" in sys.modules and not is_forked():
        # A Python job has loaded it, which takes half a gigabyte; so re-execute this process.
        os.environ[_SETTINGS_VARIABLE] = config_to_json(config)
        os.execv(sys.executable, _own_command())  # noqa: S606 - the command of this process
    supervise(config, world, guarded)
    return None


def settings_of_former_self() -> TrainConfig | None:
    """The settings of a supervisor that re-executed itself, before it loads the job again."""
    text = os.environ.pop(_SETTINGS_VARIABLE, None)
    return None if text is None else config_from_json(text)


def supervise(config: TrainConfig, world: World, guarded: Guard) -> None:
    """Supervise this rank's role to the end of the job; exits if its code is not 0."""
    log.configure(log.rank_prefix(world.rank, world.size, world.host))
    code = make_supervisor(config, world, os.environ, _own_command(), guarded.stop).run()
    if code:
        guarded.leave(code)


def _own_command() -> list[str]:
    return [sys.executable, "-m", "hvdtrain", *sys.argv[1:]]


def make_supervisor(config: TrainConfig, world: World, environ: Mapping[str, str],
                    argv: Sequence[str], stop: StopFlag) -> Supervisor:
    """Find all roles and start this rank's by `argv`; WorldError names absent ranks. All ranks."""
    roles, assignment = _assign(config, world)
    # Those in the cluster of a TF_CONFIG do not know whether there is an evaluator.
    apart = assignment.role.kind == "evaluator" and world.starter == "tf_config"
    client = open_rendezvous(replace(world, size=world.size - apart), environ, _SCOPE,
                             timeout_s=config.ps.start_timeout_s)
    if not apart:
        assignment = _meet(assignment, roles, client, config, world, environ)
    rank, hosts = world.rank, assignment.hosts
    return Supervisor(replace(assignment, threads=_threads(rank, hosts, roles)), client, config,
                      argv, {**environ, **_devices(rank, hosts, roles, environ)}, stop)


def _assign(config: TrainConfig, world: World) -> tuple[tuple[Role, ...], Assignment]:
    if world.starter == "tf_config":
        roles, role, cluster = tf_config_roles(world.evidence["TF_CONFIG"])
    else:
        roles = plan_roles(world.size, config.ps)
        role, cluster = roles[world.rank], _cluster(roles, [""] * len(roles))
    return roles, Assignment(role=role, rank=world.rank, size=world.size, host=world.host,
                             cluster=cluster, hosts=[world.host] * max(world.size, len(roles)))


def _meet(assignment: Assignment, roles: Sequence[Role], client: RendezvousClient,
          config: TrainConfig, world: World, environ: Mapping[str, str]) -> Assignment:
    """Exchange host, address and settings with the other ranks."""
    names = [f"rank {rank} ({role})" for rank, role in enumerate(roles)]
    given = world.starter == "tf_config"
    with socket.socket() as held:  # until all roles have chosen their ports
        address = (assignment.address if given else
                   f"{own_addresses(world, environ)[0]}:{_take_port(held)}")
        mine = json.dumps({
            "host": world.host, "address": address, "settings": settings_of(config),
            # The pods of a TFJob may come back with other addresses.
            "from": [] if given else sorted(interfaces().values())})
        told = [json.loads(text) for text in exchange(
            client, world, "address", mine, who=names, timeout_s=config.ps.start_timeout_s)]
    refuse_differences([one["settings"] for one in told], names)
    cluster = (assignment.cluster if given else
               _cluster(roles, [one["address"] for one in told]))
    return replace(assignment, cluster=cluster, hosts=[one["host"] for one in told],
                   admitted=sorted({source for one in told for source in one["from"]}))


def _take_port(holder: socket.socket) -> int:
    for _ in range(200):
        with suppress(OSError):
            holder.bind(("", random.randint(_FIRST_PORT, _LAST_PORT)))  # noqa: S311 - no secret
            return int(holder.getsockname()[1])
    raise WorldError(f"No free port from {_FIRST_PORT} to {_LAST_PORT} was found in 200 tries. Are "
                     "other jobs left over on this host?")


def _cluster(roles: Sequence[Role], addresses: Sequence[str]) -> Addresses:
    cluster: dict[str, list[str]] = {}
    for role, address in zip(roles, addresses, strict=True):
        if role.kind != "evaluator":
            cluster.setdefault(role.kind, []).append(address)
    return cluster


def _threads(rank: int, hosts: Sequence[str], roles: Sequence[Role]) -> int:
    """A host's cores are shared by roles that compute there; the chief mostly waits."""
    here = sum(host == hosts[rank] and role.kind != "chief"
               for host, role in zip(hosts, roles, strict=False))
    return max(1, len(os.sched_getaffinity(0)) // max(1, here))


def _devices(rank: int, hosts: Sequence[str], roles: Sequence[Role],
             environ: Mapping[str, str]) -> dict[str, str]:
    """One GPU for each worker of a host, none for the other roles."""
    if rank >= len(roles) or roles[rank].kind != "worker":
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    before = sum(hosts[r] == hosts[rank] and roles[r].kind == "worker" for r in range(rank))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {"CUDA_VISIBLE_DEVICES": str(before)}
    several = visible.split(",")
    return {"CUDA_VISIBLE_DEVICES": several[before]} if before < len(several) > 1 else {}


class Supervisor:
    """Starts the process of a role by `argv`, restarts it when lost, and ends it.

    `config` says how often to restart it, and when one that does not answer is killed; `client` is
    shared by all supervisors; `stop` is set on a request to stop, which only the chief follows.
    """

    def __init__(self, assignment: Assignment, client: RendezvousClient,
                 config: TrainConfig, argv: Sequence[str], environ: Mapping[str, str],
                 stop: StopFlag) -> None:
        self.assignment, self._client, self._config = assignment, client, config
        self._argv, self._stop = list(argv), stop
        self._environ = {k: v for k, v in environ.items() if not k.startswith(_NOT_INHERITED)}
        self._asked_s, self._heard_s = 0.0, time.monotonic()
        self._lost = 0
        self._start()

    def run(self) -> int:
        """Stay to the end of the job; returns its exit code, if another role caused it."""
        try:
            while (code := self._look()) is None:
                time.sleep(_POLL_S)
        finally:
            self._end_child()
        return code

    def _start(self) -> None:
        self._told_to_stop = False
        self._child: Process = start_program(
            self._argv, stdin=subprocess.PIPE,
            env={**self._environ, ASSIGNMENT_VARIABLE: self.assignment.to_json()})
        self._health = Health(self.assignment.address, self._config.hang_timeout_s)

    def _look(self) -> int | None:
        code = self._child.poll()
        if code is not None:
            if self._told_to_stop and code == -signal.SIGTERM:
                self._say("was told to stop before the training began")
                return self._finish(EXIT_STOPPED)
            if code >= 0 and code != EXIT_PARAMETERS_LOST:
                return self._finish(code)
            self._start_again(code)
        if self._stop.requested and not self._told_to_stop:
            self._told_to_stop = True
            if self.assignment.role.kind == "chief":
                self._child.send_signal(signal.SIGTERM)
        if (done := self._done()) is not None:
            return self._follow(*done)
        if self._health.is_frozen(self._child.pid):
            self._say(f"has not answered for {self._config.hang_timeout_s / 2:.0f} s; killed")
            self._kill_child()
        return None

    def _start_again(self, code: int) -> None:
        why = (f"was killed by {signal_name(-code)}" if code < 0 else
               "lost its connection to a server and the parameters there")
        self._lost += 1
        restarts = self._config.ps.max_restarts
        # That a server was lost is counted by its own supervisor.
        budget = restarts * (1 + self.assignment.servers if code == EXIT_PARAMETERS_LOST else 1)
        if self._lost > budget:
            self._tell_done(EXIT_RUN_FAILED)
            raise RoleLostError(
                f"{self.assignment.name} {why}, for the {self._lost}. time, and is started again "
                f"at most {budget} times (--max-restarts {restarts}). Look at its host (memory, "
                "other jobs), then go on with --resume.")
        self._say(f"{why}; started again ({self._lost} of {budget})")
        self._close_input()
        self.assignment = replace(self.assignment, starts=self._lost)
        self._start()

    def _done(self) -> tuple[int, str] | None:
        """Exit code and name of the other role that ended the job, if any."""
        if time.monotonic() - self._asked_s < _ASK_S:
            return None
        self._asked_s = time.monotonic()
        try:
            text = self._client.get("done")
        except WorldError:
            # It may be busy; if it is gone, so is the starter or the chief's host.
            if time.monotonic() - self._heard_s > _SILENCE_S:
                raise
            return None
        self._heard_s = time.monotonic()
        if text is None:
            return None
        code, who = json.loads(text)
        return int(code), str(who)

    def _finish(self, code: int) -> int:
        """End the job: this role has ended for good."""
        if self.assignment.role.kind != "chief" and code == 0:
            while (done := self._done()) is None:  # the evaluator is through, the others are not
                time.sleep(_POLL_S)
            return self._follow(*done)
        self._tell_done(code)
        own = self.assignment
        if own.role.kind == "chief":
            # The chief's host may serve the rendezvous, where all read how the job ended. The
            # evaluator of a TF_CONFIG is the rank after those that the chief knows of.
            ranks = max(own.size, 1 + own.workers + own.servers + self._config.ps.evaluator)
            self._client.wait([f"left.{rank}" for rank in range(ranks) if rank != own.rank],
                              Wait(_OTHERS_S, lambda: "the other roles", heeds_stop=False))
        if code in (0, EXIT_STOPPED):
            return code
        sys.stderr.flush()
        os._exit(code)  # the process of the role has said why

    def _follow(self, code: int, who: str) -> int:
        """Leave: another role has ended the job."""
        self._client.put(f"left.{self.assignment.rank}")
        if code in (0, EXIT_STOPPED):
            return code
        self._end_child()
        self._say(f"ends with {who}")
        time.sleep(_CAUSE_S)  # the cause is seen to end first
        os._exit(code)

    def _tell_done(self, code: int) -> None:
        if self._client.get("done") is None:
            self._client.put("done", json.dumps([code, self.assignment.name]).encode())

    def _end_child(self) -> None:
        """Workers and servers end with their input; the evaluator when it is done."""
        self._close_input()
        is_evaluator = self.assignment.role.kind == "evaluator"
        try:
            self._child.wait(_LAST_EVALUATION_S if is_evaluator else _END_S)
        except subprocess.TimeoutExpired:
            self._kill_child()

    def _kill_child(self) -> None:
        self._child.kill()
        with suppress(subprocess.TimeoutExpired):  # in an uninterruptible wait, as for a device
            self._child.wait(_END_S)

    def _close_input(self) -> None:
        if self._child.stdin is not None:
            with suppress(OSError):
                self._child.stdin.close()

    def _say(self, what: str) -> None:
        log.get_logger().warning("%s %s", self.assignment.name, what)
