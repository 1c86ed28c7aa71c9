"""Our own starter: one agent per host starts the ranks; the job is watched and ended as a whole.

An agent (`agent.py`) is a separate process, so that the ranks end even if the launcher is killed.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from hvdtrain.errors import (
    EXIT_HOST_LOST,
    EXIT_RUN_FAILED,
    EXIT_SIGNALLED,
    EXIT_STOPPED,
    EXIT_TIME_OVER,
    LaunchError,
    MachineError,
)
from hvdtrain.fork import can_fork
from hvdtrain.hosts import Slot, rank_variables
from hvdtrain.launch import hop
from hvdtrain.launch.bring_up import await_facts
from hvdtrain.launch.link import LEASE_S, AgentLink, choose_interface, launcher_address
from hvdtrain.launch.output import RankOutput, WaitingNotice
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.running_job import FAILURE_GRACE_S, JobEnd, RankEnd, RunningJob, describe
from hvdtrain.launch.tree import Tree
from hvdtrain.preload import client as preload_client
from hvdtrain.process import SignalInbox, allow_open_files, signal_name
from hvdtrain.rendezvous.secret import SECRET_VARIABLE, JobKey
from hvdtrain.rendezvous.serve import RendezvousServer, gloo_variables, listen_on_all, serve
from hvdtrain.world.detect import HOSTS_VARIABLE

_RETRY_S, _REAP_S, _PAUSE_S = 1.0, 2.0, 0.2
_CAUSE_WAIT_S, _SECONDARY_WAIT_S = 0.3, 2.0  # wait for the cause: its peer may be seen first
_PEERS = 3  # that each agent looks up; one name alone may be wrong
_FILES, _FILES_OF_LINK, _NAMED = 128, 8, 8

# Valid on this host, in this terminal or login only.
_OF_THIS_HOST = {"HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "DISPLAY", "WINDOWID", "XAUTHORITY",
                 preload_client.SOCKET_VARIABLE}
_OF_THIS_LOGIN = ("SSH_", "XDG_", "BASH_FUNC_", "DBUS_SESSION_")


class NativeJob(RunningJob):
    """One job; no rank starts before every agent is up. `env`, with the job's secret, is shared."""

    def __init__(self, plan: LaunchPlan, output: RankOutput, env: Mapping[str, str],
                 stdin: int | None = None) -> None:
        super().__init__(plan, output)
        self._env, self._resources, self._stdin = env, ExitStack(), None
        if stdin is not None:
            self._stdin = os.dup(stdin)
            self._resources.callback(os.close, self._stdin)
        hosts = list(plan.hosts)
        self._links = {
            host: AgentLink(host, [*islice((other for other in hosts if other != host), _PEERS)],
                            None if host in plan.local_hosts else plan.options.remote)
            for host in hosts}
        self._notes: set[tuple[str, str]] = set()
        self._former_files: tuple[int, int] | None = None
        self._tree: Tree | None = None  # by which the agents were started, where it leads there
        self._rendezvous: RendezvousServer | None = None
        self._resources.callback(self._close_rendezvous)

    def run(self, inbox: SignalInbox) -> JobEnd:
        """Start the ranks and wait for their end.

        LaunchError if a host has no usable network interface, MachineError if hosts cannot be
        reached; then nothing was started.
        """
        self._former_files = allow_open_files(_FILES + _FILES_OF_LINK * len(self._links))
        with self._resources, self.selector:
            try:
                if not self._bring_up(inbox):
                    return JobEnd(
                        code=EXIT_SIGNALLED + self.signal, signal=self.signal,
                        report=(f"ended by {signal_name(self.signal)} before the ranks started",))
                self._send_work()
                for link in self._links.values():
                    self.watch(link, partial(self._read, link))
                    self.watch(link.stderr_fileno(), partial(self._read_errors, link))
                self.serve(inbox)
            finally:
                for link in self._links.values():
                    link.close()
                deadline = time.monotonic() + _REAP_S
                for link in self._links.values():
                    link.reap(max(0.1, deadline - time.monotonic()))
        return self._end()

    def is_over(self) -> bool:
        """See `RunningJob.is_over`."""
        return len(self.ends) == self.plan.np

    def send(self, number: int) -> None:
        """Through the agents."""
        for link in self._links.values():
            link.send({"signal": number})

    def failure_wait_s(self, end: RankEnd) -> float:
        """Longer after a rank that stopped on request: all of them do, one after the other."""
        if end.code == EXIT_STOPPED:
            return min(self.plan.options.grace_s, FAILURE_GRACE_S)
        return _SECONDARY_WAIT_S if end.secondary else _CAUSE_WAIT_S

    def pause(self) -> None:
        """Stop the ranks too, since their agents would miss this launcher."""
        self.output.say("stopped, and all ranks with it; `fg` goes on")
        self.send(signal.SIGSTOP)
        time.sleep(_PAUSE_S)  # the links' threads send it
        if self._tree is not None:
            self._tree.pause(hop.PAUSED)
            time.sleep(_PAUSE_S)
        os.kill(os.getpid(), signal.SIGSTOP)
        if self._tree is not None:
            self._tree.pause(hop.RESUMED)
        self.send(signal.SIGCONT)

    def _start(self, link: AgentLink) -> None:
        if link.is_local and can_fork():
            self._limit_files(link.fork(keep=() if self._stdin is None else (self._stdin,)))
            if len(self._links) > 1:
                link.start_sending()
        else:
            link.start(self.start_process)

    def start_process(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start an agent, or the ssh to it."""
        pipe = subprocess.PIPE
        try:
            # A session of its own: Ctrl-C in the terminal reaches the launcher alone.
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe,
                                       start_new_session=True,
                                       pass_fds=() if self._stdin is None else (self._stdin,))
        except OSError as error:
            raise MachineError(f"{command[0]} cannot be started: {error}. Other hosts are reached "
                               "with it; install it (Debian/Ubuntu: apt-get install "
                               "openssh-client).") from error
        self._limit_files(process.pid)
        return process

    def _limit_files(self, pid: int) -> None:
        """The ranks of this host get the limit of their login."""
        if self._former_files is not None:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, self._former_files)

    def open_rendezvous(self, addresses: Collection[str],
                        sources: Sequence[str]) -> Mapping[str, int]:
        """Listen at addresses of this host, for requests from `sources`; the port of each."""
        try:
            listeners = listen_on_all(addresses)
        except OSError as error:
            raise LaunchError(
                f"The ranks cannot reach this launcher: they see it as {' and '.join(addresses)}, "
                f"where it cannot listen ({error}). Expected hosts that reach this one without "
                "network address translation. Start the launch on one of them.") from error
        self._close_rendezvous()  # that of a former world
        self._rendezvous = serve(listeners, hosts=list(self.plan.hosts), sources=sources,
                                 slots=list(self.plan.hosts.values()),
                                 key=JobKey(self._env[SECRET_VARIABLE]), forks=True)
        return self._rendezvous.ports

    def _close_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None

    def _bring_up(self, inbox: SignalInbox) -> bool:
        """Start all agents and wait until each has sent its facts; False when interrupted."""
        started = time.monotonic()
        pending, problems = dict(self._links), dict[str, str]()
        waiting, limit_s = WaitingNotice(self.output.say), self.plan.start_timeout_s

        def give_up(silent: Collection[str]) -> bool:
            waiting.tick(lambda: "; ".join(
                f"{host} ({problems.get(host, 'no answer yet')})" for host in [*silent][:_NAMED])
                + (f"; and {len(silent) - _NAMED} more" if len(silent) > _NAMED else ""))
            return self._interrupted(inbox)

        if self.plan.options.ssh_fanout is not None:
            problems = self._climb(self.plan.options.ssh_fanout, give_up)
            pending = {host: self._links[host] for host in problems}
        while pending and not self._interrupted(inbox):
            problems = await_facts(pending, self._start, give_up)
            pending = {host: self._links[host] for host in problems}
            if problems and time.monotonic() - started > limit_s:
                after = f" after {limit_s:g} s" if limit_s else ""
                raise MachineError("\n".join([
                    f"{len(problems)} of the hosts cannot be used{after}, so no rank was started:",
                    *(f"  {host}: {text}" for host, text in problems.items()),
                    "Expected that this works without a question: ssh -o BatchMode=yes "
                    f"{next(iter(problems))} true. `hvdtrain doctor -H {','.join(problems)}` looks "
                    "closer."]))
            if problems and not give_up(problems):
                time.sleep(_RETRY_S)
        return not self._interrupted(inbox)

    def _climb(self, fanout: int, give_up: Callable[[Collection[str]], bool]) -> dict[str, str]:
        """Start agents by a tree; what is wrong with those that must be started from here."""
        hosts = [link.host for link in self._links.values() if not link.is_local]
        tree = self._tree = Tree(hosts, fanout, self.start_process)
        self._resources.callback(tree.close)

        def start(link: AgentLink) -> None:
            (self._start if link.is_local else tree.start)(link)

        problems = await_facts(self._links, start, give_up, at_once=len(self._links))
        for host in problems:
            tree.forget(host)
        if problems:
            host, text = next(iter(problems.items()))
            self.output.say(f"{len(problems)} of the hosts were not reached by way of others, and "
                            f"are tried from here; {host}: {text}")
        return problems

    def _interrupted(self, inbox: SignalInbox) -> bool:
        for number in {*inbox.take()} & {signal.SIGINT, signal.SIGTERM}:
            self.signal = number
        return self.signal != 0

    def _send_work(self) -> None:
        plan, networks = self.plan, self.plan.options.network_interface
        links = {host: self._links[host] for host in plan.hosts}
        facts = {host: link.facts for host, link in links.items() if link.facts}
        addresses = {host: "127.0.0.1" if link.is_local else launcher_address(host, facts[host])
                     for host, link in links.items()}
        # The ranks of one host talk over its loopback interface.
        interfaces = {host: "lo" if len(facts) == 1 else choose_interface(host, its, networks)
                      for host, its in facts.items()}
        sources = [network for network in networks if "/" in network]
        for its in facts.values():
            for address in (*its.interfaces.values(), its.ssh_server or ""):
                with suppress(ValueError):  # IPv6, or none
                    sources.append(str(ipaddress.IPv4Address(address)))
        ports = self.open_rendezvous(dict.fromkeys(addresses.values()),
                                     list(dict.fromkeys(sources)))
        preload = preload_work() if plan.preload else None
        slots: dict[str, list[Slot]] = {host: [] for host in links}
        for slot in plan.slots:
            slots[slot.host].append(slot)
        host_list = plan.host_list
        for host, link in links.items():
            shared = {"NCCL_SOCKET_IFNAME": interfaces[host], **self._env_for(link),
                      **gloo_variables(address=addresses[host], port=ports[addresses[host]],
                                       interface=interfaces[host],
                                       key=JobKey(self._env[SECRET_VARIABLE])),
                      HOSTS_VARIABLE: host_list}
            ranks = {slot.rank: rank_variables(slot, plan.np) for slot in slots[host]}
            link.send(self._work(link, shared, ranks, preload), is_work=True)

    def _env_for(self, link: AgentLink) -> dict[str, str]:
        """The environment of the ranks of a host, without what is of this one only."""
        return {name: value for name, value in self._env.items()
                if link.is_local or not (name in _OF_THIS_HOST
                                         or name.startswith(_OF_THIS_LOGIN))}

    def _work(self, link: AgentLink, env: Mapping[str, str], ranks: Mapping[int, Any],
              preload: Any) -> dict[str, Any]:
        """What an agent gets to do."""
        return {"command": self.plan.argv, "directory": os.getcwd(), "env": env, "ranks": ranks,
                "grace_s": self.plan.options.grace_s, "preload": preload,
                "stdin": self._stdin if link.is_local else None,
                # On this host the end of the launcher closes the pipe.
                "lease_s": 0 if link.is_local else LEASE_S}

    def _read_errors(self, link: AgentLink) -> None:
        lines = link.read_stderr()
        if lines is None:
            self.selector.unregister(link.stderr_fileno())
        for line in lines or ():
            self.output.say(f"{link.host}: {line}")

    def _read(self, link: AgentLink) -> None:
        messages = link.read()
        for message, payload in messages or ():
            self._take(link, message, payload)
        if messages is None:
            for descriptor in (link.fileno(), link.stderr_fileno()):
                with suppress(KeyError):
                    self.selector.unregister(descriptor)
            self._lose(link)

    def _take(self, link: AgentLink, message: dict[str, Any], payload: bytes) -> None:
        rank: Any = message.get("rank")
        note = message.get("text", "")
        if not note and not (type(rank) is int and 0 <= rank < self.plan.np
                             and self.plan.slots[rank].host == link.host):
            note = f"its agent speaks for rank {rank!r}, which is not there"
        if note:
            if (link.host, note) not in self._notes:  # each rank of a host has the same one
                self._notes.add((link.host, note))
                self.output.say(f"{link.host}: {note}")
        elif message["type"] == "output":
            self.output.feed(rank, message["stream"], payload)
        else:
            self._ended(rank, message["code"], message["time"], message["reason"],
                        link.facts.clock_offset_s if link.facts else 0.0)

    def _ended(self, rank: int, code: int, time_s: float, reason: str,
               offset_s: float = 0.0) -> None:
        self.output.finish(rank)
        if code == 0 and self.plan.says_done and rank not in self.output.done:
            code, reason = EXIT_RUN_FAILED, "left early with code 0"
        self.end_rank(rank, code, time_s, reason, offset_s)

    def _lose(self, link: AgentLink) -> None:
        """The stream of an agent has ended; if ranks are left, the agent or its host is gone."""
        above = None if self._tree is None else self._tree.lost_above(link.host)
        if above is not None:  # the cause, and so the first
            link_above = self._links[above]
            while any(key.fileobj is link_above for key in self.selector.get_map().values()):
                self._read(link_above)
        left = [slot.rank for slot in self.plan.slots
                if slot.host == link.host and slot.rank not in self.ends]
        code, reason = -signal.SIGKILL, "its agent ended unexpectedly"
        if left and not link.is_local:
            link.reap(_CAUSE_WAIT_S)
            code, reason = EXIT_HOST_LOST, f"the connection to {link.host} was lost"
            reason += f", which was reached by way of {above}" if above is not None else ""
            reason += f" ({'; '.join(link.last_words)})" if link.last_words else ""
        for rank in left:
            self._ended(rank, code, time.time(), reason)

    def _end(self) -> JobEnd:
        ends = list(self.ends.values())
        if self.is_over() and all(end.code == EXIT_STOPPED for end in ends):
            code = EXIT_TIME_OVER if self.why_stopped == "timeout" else EXIT_STOPPED
            return JobEnd(code=code, signal=self.signal, report=("all ranks stopped on request",))
        cause = self.first_failure(ends)
        if cause is not None:
            return JobEnd(code=cause.exit_code, cause=cause, report=tuple(describe(
                cause, self.ends, np=self.plan.np, started_s=self.started_s,
                log=self.output.log_path(cause.rank))))
        if self.why_stopped == "timeout" or not self.signal:
            return JobEnd(code=EXIT_TIME_OVER if self.why_stopped == "timeout" else 0)
        # A code the ranks chose themselves counts: it may ask for a requeue.
        code = next((end.code for end in ends if end.code > 0), EXIT_SIGNALLED + self.signal)
        if self.is_over() and not any(end.code for end in ends):
            code = 0
        return JobEnd(code=code, signal=self.signal, report=(
            f"ended by {signal_name(self.signal)} {time.time() - self.started_s:.1f} s after the "
            "start",))


def preload_work() -> dict[str, Any]:
    """What an agent needs for a preloaded process."""
    # Imported here: other jobs do not need it.
    from hvdtrain.preload.server import server_command
    return {"server": server_command(),
            "client": Path(preload_client.__file__).read_text(encoding="utf-8")}
