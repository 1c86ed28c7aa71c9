"""A job whose ranks and hosts come and go: it ends all ranks and starts others, which go on.

The ranks between two changes are a *world*. Each host has an agent that stays, with a preloaded
process from which ranks are forked, and a folder in memory where they commit their state
(`train/commits.py`). After a failure all ranks are killed; before a change that can wait they are
asked to commit and end. No rank negotiates with one that may be dead. `worlds.py` decides.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from hvdtrain.commit_names import COMMITS_VARIABLE, ENDING_VARIABLE, WORLD_VARIABLE
from hvdtrain.errors import (
    EXIT_HOST_LOST,
    EXIT_MACHINE,
    EXIT_NOT_FINITE,
    EXIT_NOT_WRITTEN,
    EXIT_RANKS_DIFFER,
    EXIT_STOPPED,
    EXIT_TOO_FEW,
    EXIT_USAGE,
)
from hvdtrain.hosts import Host, assign_ranks, in_allocation
from hvdtrain.launch.bring_up import why_ended
from hvdtrain.launch.discovery import Discovery
from hvdtrain.launch.link import AgentLink
from hvdtrain.launch.native import PEERS, NativeJob, preload_work
from hvdtrain.launch.output import RankOutput, WaitingNotice
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.running_job import GIVE_UP_S, JobEnd, RankEnd
from hvdtrain.launch.worlds import Bar, Bars, change_text, next_world
from hvdtrain.process import SignalInbox

_MEMORY = "/dev/shm"  # noqa: S108 - the folder is made for this user only
_TICK_S, _SETTLE_S = 0.25, 1.0  # hosts that come together make one change
_ANSWER_S, _CHANGE_S, _KILL_S = 60.0, 30.0, 1.0
_CAUSE_S, _SECONDARY_S, _REAP_S = 0.05, 1.0, 2.0
_SAME_FAILURES = 3
_OF_THE_JOB = {EXIT_USAGE, EXIT_MACHINE, EXIT_NOT_FINITE, EXIT_RANKS_DIFFER, EXIT_NOT_WRITTEN}
"""Codes of errors that another world would have too."""


@dataclass(eq=False)
class _Member:
    """A host with an agent; `busy` until its agent has told that all ranks have ended."""

    link: AgentLink
    slots: int
    since_s: float
    state: Literal["starting", "preparing", "ready"] = "starting"
    commit: int = 0
    busy: bool = False


class ElasticJob(NativeJob):
    """One job. `plan` has its command and options; `is_local` tells names of this host."""

    def __init__(self, plan: LaunchPlan, output: RankOutput, env: Mapping[str, str],
                 discovery: Discovery, is_local: Callable[[str], bool]) -> None:
        super().__init__(replace(plan, slots=()), output, env)
        self._discovery, self._is_local = discovery, is_local
        self._members: dict[str, _Member] = {}
        self._leaving: list[AgentLink] = []
        self._bars = Bars()
        self._world, self._hosts = 0, tuple[Host, ...]()
        self._is_running = self._is_done = False
        self._why = "the start"
        self._asked_s: float | None = None  # when the ranks were asked to end for a change
        self._better_s: float | None = None  # since when a better world is possible
        self._few_s: float | None = None  # since when there are too few ranks
        self._notice: WaitingNotice | None = None
        self._ending: tuple[str, ...] = ()
        self._alike = 0
        self._last_failure: tuple[int, str] | None = None

    def run(self, inbox: SignalInbox) -> JobEnd:
        """Start worlds until one has ended well, or no further one can."""
        with self._resources, self.selector:
            self._resources.callback(self._discovery.close)
            try:
                self._meet()
                self._discovery.start()
                self.watch(self._discovery, self._hosts_changed)
                self._tick()
                self.serve(inbox)
            finally:
                links = [*(member.link for member in self._members.values()), *self._leaving]
                for member in self._members.values():
                    member.link.send({"forget": True})
                for link in links:
                    link.close()
                deadline = time.monotonic() + _REAP_S
                for link in links:
                    link.reap(max(0.1, deadline - time.monotonic()))
        if self._ending:
            return JobEnd(code=EXIT_TOO_FEW, report=self._ending)
        return self._end()

    def is_over(self) -> bool:
        """See `RunningJob.is_over`."""
        return self._is_done

    # Hosts

    @property
    def _least(self) -> int:
        return self.plan.options.elastic.min_np or 1

    @property
    def _most(self) -> int | None:
        return self.plan.options.elastic.max_np or self.plan.options.np

    def _hosts_changed(self) -> None:
        self._discovery.take()
        if self._discovery.problem:
            self.output.say(f"{self._discovery.problem} The hosts stay as they were.")

    def _meet(self) -> None:
        """Start agents on hosts that are new, or may be tried again; let others go."""
        now, wanted = time.monotonic(), {host.name: host for host in self._discovery.hosts}
        for name, host in wanted.items():
            bar = self._bars.hosts.get(name)
            if name in self._members:
                self._members[name].slots = host.slots
            elif bar is None or bar.until_s <= now:
                self._start_agent(name, host.slots)
        for name, member in list(self._members.items()):
            if name not in wanted and not member.busy:
                self._let_go(name, member)
            elif member.state == "starting" and now - member.since_s > _ANSWER_S:
                self.output.say(f"{name}: no answer in {_ANSWER_S:g} s")
                self._lose(member.link)

    def _start_agent(self, name: str, slots: int) -> None:
        peers = [host.name for host in self._discovery.hosts if host.name != name][:PEERS]
        local = self._is_local(name)
        # Nodes of a Slurm job that the user has not named need no ssh.
        link = AgentLink(name, peers, None if local else self.plan.options.remote,
                         by_slurm=in_allocation(os.environ) and not self.plan.options.names_hosts)
        link.prepare()
        self._start(link)
        self._members[name] = _Member(link, slots, time.monotonic())
        self._links[name] = link
        self.watch(link, partial(self._read, link))
        self.watch(link.stderr_fileno(), partial(self._read_errors, link))

    def _let_go(self, name: str, member: _Member) -> None:
        self.output.say(f"{name} leaves the job")
        member.link.send({"forget": True})
        self._forget(member.link)
        self._leaving.append(member.link)

    def _forget(self, link: AgentLink) -> None:
        """Take a link out of everything; it is not waited for here."""
        for descriptor in (link.fileno(), link.stderr_fileno()):
            if descriptor in self.selector.get_map():
                self.selector.unregister(descriptor)
        link.close()
        if self._members.get(link.host) is not None and (
                self._members[link.host].link is link):
            del self._members[link.host], self._links[link.host]

    def _read(self, link: AgentLink) -> None:
        super()._read(link)
        member = self._members.get(link.host)
        if member is not None and member.link is link and member.state == "starting" and (
                link.facts is not None):
            member.state = "preparing"
            link.send(self._work(link, self._env_for(link), {}, preload_work()), is_work=True)

    def _work(self, link: AgentLink, env: Mapping[str, str], ranks: Mapping[int, Any],
              preload: Any) -> dict[str, Any]:
        commits = commits_folder(self.plan.argv, link.host)
        return super()._work(link, {**env, COMMITS_VARIABLE: commits}, ranks, preload) | {
            "commits": commits, "keep_s": self.plan.options.elastic.timeout_s}

    def _take(self, link: AgentLink, message: dict[str, Any], payload: bytes) -> None:
        member = self._members.get(link.host)
        if message.get("type") not in ("ready", "idle") or member is None:
            super()._take(link, message, payload)
            return
        member.commit, member.busy = int(message["commit"]), False
        if message["type"] == "ready":
            member.state = "ready"
        self._look()

    def _lose(self, link: AgentLink) -> None:
        """An agent, or its host, is gone."""
        member = self._members.get(link.host)
        if member is None or member.link is not link:
            return
        name, was = link.host, member.state
        self._forget(link)
        self._leaving.append(link)
        if was != "ready":
            self.output.say(f"{name} cannot be used: {why_ended(link)}")
        bar_s = self._bars.hosts.setdefault(name, Bar()).fail(
            time.monotonic(), first_counts=was != "ready")
        if bar_s:
            self.output.say(f"{name} is tried again in {bar_s:g} s")
        if self._is_running:
            super()._lose(link)  # tells how its ranks have ended
        self._look()

    # Worlds

    def _tick(self) -> None:
        self.arm("tick", _TICK_S, self._tick)
        self._meet()
        self._look()

    def _look(self) -> None:
        """React to what is known now."""
        if self._is_done:
            return
        if not self._is_running:
            self._try_world()
        elif len(self.ends) == self.plan.np and not any(
                member.busy for member in self._members.values()):
            self._world_is_over()
        elif self._asked_s is None and not self.why_stopped:
            self._consider_change()

    def _possible(self) -> tuple[Host, ...]:
        """The hosts of the best world that is possible now; empty: too few ranks."""
        now = time.monotonic()
        wanted = {host.name for host in self._discovery.hosts}
        ready = [Host(name, self._bars.free(Host(name, member.slots), now))
                 for name, member in self._members.items()
                 if member.state == "ready" and name in wanted]
        return next_world(ready, {name: member.commit for name, member in self._members.items()},
                          [host.name for host in self._hosts],
                          least=self._least, most=self._most)

    def _try_world(self) -> None:
        now, waits = time.monotonic(), [
            name for name, member in self._members.items() if member.state != "ready"]
        if self._world == 0 and waits:
            return  # each answers, or is given up
        hosts = self._possible()
        if hosts:
            self._few_s = self._notice = None
            self._start_world(hosts)
            return
        self._few_s = self._few_s or now
        self._notice = self._notice or WaitingNotice(self.output.say)
        self._notice.tick(lambda: (
            f"hosts: fewer than {self._least} ranks are possible"
            + (f" ({', '.join(waits)} starting)" if waits else "")))
        if now - self._few_s > self.plan.options.elastic.timeout_s:
            self._give_up_waiting()

    def _give_up_waiting(self) -> None:
        """Let the ranks that are possible save the state on disk."""
        self._ending = (
            f"fewer than --min-np {self._least} ranks for "
            f"{self.plan.options.elastic.timeout_s:g} s (--elastic-timeout)",)
        now = time.monotonic()
        some = tuple(Host(name, free) for name, member in self._members.items()
                     if member.state == "ready" and (free := self._bars.free(
                         Host(name, member.slots), now)))
        if some and self._world:
            self._env = {**self._env, ENDING_VARIABLE: "1"}
            self._start_world(next_world(
                some, {name: member.commit for name, member in self._members.items()}, (),
                least=1, most=None))
        else:
            self._is_done = True

    def _start_world(self, hosts: tuple[Host, ...]) -> None:
        slots = assign_ranks(hosts, sum(host.slots for host in hosts))
        before, self._hosts = self._hosts, hosts
        self._world += 1
        self.plan = replace(self.plan, slots=slots)
        self.ends.clear()
        self.why_stopped, self.stopped_s, self._asked_s, self._better_s = "", None, None, None
        self.output.begin_again()
        commit = max((member.commit for member in self._members.values()), default=0)
        self.output.say(
            f"world {self._world}: {len(slots)} rank{'s' * (len(slots) > 1)} on "
            f"{self.plan.host_list} after {self._why}"
            + (f" ({change_text(before, hosts)}); from step {commit}" if before else ""))
        self._env = {**self._env, WORLD_VARIABLE: str(self._world)}
        self._is_running = True
        for host in hosts:
            self._members[host.name].busy = True
        self._send_work()

    def _consider_change(self) -> None:
        possible, now = self._possible(), time.monotonic()
        wanted = {host.name: host.slots for host in self._discovery.hosts}
        leaves = [host.name for host in self._hosts
                  if wanted.get(host.name, 0) < host.slots]
        more = sum(host.slots for host in possible) - self.plan.np
        if leaves:
            self._ask_for_change(f"{', '.join(leaves)} leave{'s' * (len(leaves) == 1)}")
        elif more > 0:
            self._better_s = self._better_s or now
            if now - self._better_s >= _SETTLE_S:
                self._ask_for_change(f"{more} more rank{'s' * (more > 1)}")
        else:
            self._better_s = None

    def _ask_for_change(self, why: str) -> None:
        """The ranks commit and end; after `_CHANGE_S` they are killed, and lose some steps."""
        self._why, self._asked_s = why, time.monotonic()
        for host in self._hosts:
            if host.name in self._links:
                self._links[host.name].send({"change": True})
        self.arm("change", _CHANGE_S, partial(self.stop, "change", signal.SIGKILL, _KILL_S))

    def _world_is_over(self) -> None:
        self._is_running = False
        for name in ("failure", "kill", "give up", "change"):
            self._deadlines.pop(name, None)
        ends = list(self.ends.values())
        asked = self._asked_s is not None and all(
            end.code in (0, EXIT_STOPPED) for end in ends)
        stopped = self.why_stopped in ("signal", "timeout") or (
            self._asked_s is None and all(end.code == EXIT_STOPPED for end in ends))
        if stopped or self._ending or not any(end.code for end in ends):
            self._is_done = True
        elif not asked and self.why_stopped != "change":
            self._judge(ends)
        self._look()

    def _judge(self, ends: list[RankEnd]) -> None:
        """After a failure: whether another world may be tried, and without which slot."""
        cause = self.first_failure(ends)
        if cause is None:
            return
        commit = max((member.commit for member in self._members.values()), default=0)
        same = self._last_failure == (commit, cause.manner)
        self._alike = self._alike + 1 if same else 1
        self._last_failure = commit, cause.manner
        told = {(end.code, end.record.error, end.record.message) if end.record else None
                for end in ends}
        all_alike = len(ends) > 1 and len(told) == 1 and None not in told
        if cause.exit_code in _OF_THE_JOB or all_alike or self._alike >= _SAME_FAILURES:
            self._is_done = True
            return
        self._why = f"rank {cause.rank} on {cause.host} failed: {cause.manner}"
        if cause.code != EXIT_HOST_LOST and cause.host in self._members:
            place = cause.host, self.plan.slots[cause.rank].local_rank
            bar_s = self._bars.slots.setdefault(place, Bar()).fail(time.monotonic())
            if bar_s:
                self.output.say(f"a slot of {cause.host} is left out for {bar_s:g} s: its rank "
                                "failed again")

    # What the ranks do

    def failure_wait_s(self, end: RankEnd) -> float:
        """Not long: the others cannot go on."""
        if end.code == EXIT_STOPPED and self._asked_s is not None:
            return min(self.plan.options.grace_s, _CHANGE_S)  # the others end too
        return _SECONDARY_S if end.secondary else _CAUSE_S

    def stop(self, why: str, number: int, grace_s: float) -> None:
        """After a failure nothing is left to save that is not committed."""
        if why == "failure":
            number, grace_s = signal.SIGKILL, _KILL_S
        super().stop(why, number, grace_s)
        if not self._is_running:  # told to end while it waits for hosts
            self._is_done = True

    def kill(self) -> None:
        """End what is left; a host that does not answer is lost."""
        self.send(signal.SIGKILL)
        self.arm("give up", GIVE_UP_S, self._give_up_hosts)

    def _give_up_hosts(self) -> None:
        for member in [member for member in self._members.values() if member.busy]:
            self._lose(member.link)
        if self.why_stopped in ("signal", "timeout"):
            self._is_done = True

    def end_rank(self, rank: int, code: int, time_s: float, reason: str = "",
                 offset_s: float = 0.0) -> None:
        """See `RunningJob.end_rank`."""
        super().end_rank(rank, code, time_s, reason, offset_s)
        self._look()


def commits_folder(argv: Sequence[str], host: str) -> str:
    """The folder in a host's memory for the commits of a job, the same for its next launcher."""
    text = "\0".join((os.getcwd(), *argv, os.environ.get("SLURM_JOB_ID", ""), host))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{_MEMORY}/hvdtrain-{os.geteuid()}-{digest}"
