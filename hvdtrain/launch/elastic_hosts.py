"""The hosts of an elastic job: their agents, which of them are left out, and which leave."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from hvdtrain.commit_names import COMMITS_VARIABLE
from hvdtrain.errors import LaunchError, MachineError
from hvdtrain.hosts import Host, in_allocation
from hvdtrain.launch.bring_up import why_ended
from hvdtrain.launch.discovery import Discovery
from hvdtrain.launch.link import AgentLink, choose_interface, launcher_address
from hvdtrain.launch.native import PEERS, NativeJob, preload_work
from hvdtrain.launch.output import RankOutput
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.worlds import Bar, Bars, Timeline
from hvdtrain.world.network import route_to

_MEMORY = "/dev/shm"  # noqa: S108 - the folder is made for this user only
_ANSWER_S, _IMPORTS_S = 60.0, 300.0
_ALIVE_EVERY_S, _SILENT_S = 3.0, 12.0


@dataclass(eq=False)
class Member:
    """A host with an agent; `busy` until its agent has told that all ranks have ended."""

    link: AgentLink
    slots: int
    since_s: float
    state: Literal["starting", "preparing", "ready"] = "starting"
    commit: int = 0
    busy: bool = False
    asked_s: float = 0.0  # whether it is alive
    heard_s: float = 0.0


class ElasticHosts(NativeJob):
    """A job whose hosts change; a subclass starts ranks on them."""

    def __init__(self, plan: LaunchPlan, output: RankOutput, env: Mapping[str, str],
                 discovery: Discovery, is_local: Callable[[str], bool]) -> None:
        super().__init__(replace(plan, slots=()), output, env)
        self.discovery, self._is_local = discovery, is_local
        self.members: dict[str, Member] = {}
        self.leaving: list[AgentLink] = []
        self.bars = Bars()
        self.timeline = Timeline()
        self._met_s = 0.0

    def look(self) -> None:
        """React to what is known now."""
        raise NotImplementedError

    @property
    def wanted(self) -> dict[str, int]:
        """The slots of the hosts of now."""
        return {host.name: host.slots for host in self.discovery.hosts}

    @property
    def commits(self) -> dict[str, int]:
        """The newest commit of each host."""
        return {name: member.commit for name, member in self.members.items()}

    def keeps(self, name: str) -> bool:
        """Whether a host alone, of those that stay, has the newest commit."""
        commits, wanted = self.commits, self.wanted
        newest = max(commits.values(), default=0)
        return bool(newest) and commits.get(name) == newest and not any(
            commit == newest and other in wanted
            for other, commit in commits.items() if other != name)

    def ready(self, *, all_slots: bool = False, taken: bool = False) -> list[Host]:
        """The hosts that can start ranks now, with the number that each may take.

        `taken`: also where all hosts were taken away, those that have the newest commit.
        """
        now, wanted = time.monotonic(), self.wanted
        found = list[Host]()
        if not wanted and not taken:
            return found
        for name, member in self.members.items():
            if member.state == "ready" and (name in wanted or self.keeps(name)):
                free = self.bars.free(Host(name, member.slots), now, all_slots=all_slots)
                found.append(Host(name, max(1, free) if self.keeps(name) else free))
        return found

    def hosts_changed(self) -> None:
        """There is news of the discovery."""
        self.discovery.take()
        if self.discovery.problem:
            self.output.say(f"{self.discovery.problem} The hosts stay as they were.")

    def meet(self) -> None:
        """Start agents on hosts that are new, or may be tried again; let others go."""
        now, wanted = time.monotonic(), self.wanted
        for name, slots in wanted.items():
            bar = self.bars.hosts.get(name)
            if name in self.members:
                self.members[name].slots = slots
            elif bar is None or bar.until_s <= now:
                self._start_agent(name, slots)
        for name, member in list(self.members.items()):
            limit_s = {"starting": _ANSWER_S, "preparing": _IMPORTS_S}.get(member.state)
            if name not in wanted and not member.busy and not self.keeps(name):
                self._let_go(name, member)
            elif limit_s is not None and now - member.since_s > limit_s:
                self.output.say(f"{name}: no answer in {limit_s:g} s")
                self._lose(member.link)
        for link in [link for link in self.leaving if link.has_ended()]:
            link.reap(0.0)
            self.leaving.remove(link)
        self._lose_silent(now)

    def _lose_silent(self, now: float) -> None:
        """Lose hosts that do not answer: srun sees it after SlurmdTimeout, ssh by itself."""
        was_stopped = now - self._met_s > _ALIVE_EVERY_S  # this launcher, as by Ctrl-Z
        self._met_s = now
        for member in [member for member in self.members.values()
                       if member.link.by_slurm and member.state == "ready"]:
            if was_stopped:
                member.heard_s = now
            if now - member.asked_s > _ALIVE_EVERY_S:
                member.asked_s = now
                member.link.send({"alive": True})
            if now - member.heard_s > _SILENT_S:
                member.link.last_words.append(f"no answer in {_SILENT_S:g} s")
                self._lose(member.link)

    def close_all(self, *, forget: bool) -> None:
        """Let all agents end; `forget` the commits."""
        for member in self.members.values():
            if forget:
                member.link.send({"forget": True})
        links = [*(member.link for member in self.members.values()), *self.leaving]
        for link in links:
            link.close()
        deadline = time.monotonic() + 2.0
        for link in links:
            link.reap(max(0.1, deadline - time.monotonic()))

    def _start_agent(self, name: str, slots: int) -> None:
        peers = [host.name for host in self.discovery.hosts if host.name != name][:PEERS]
        # Nodes of a Slurm job that the user has not named need no ssh.
        link = AgentLink(name, peers, None if self._is_local(name) else self.plan.options.remote,
                         by_slurm=in_allocation(os.environ) and not self.plan.options.names_hosts)
        try:
            link.prepare()
            self._start(link)
        except MachineError as error:
            self._bar(name, str(error))
            return
        self.members[name] = Member(link, slots, time.monotonic())
        self._links[name] = link
        self.watch(link, partial(self._read, link))
        self.watch(link.stderr_fileno(), partial(self._read_errors, link))

    def _bar(self, name: str, why: str = "", *, first_counts: bool = True) -> None:
        if why:
            self.output.say(f"{name} cannot be used: {why}")
        bar_s = self.bars.hosts.setdefault(name, Bar()).fail(
            time.monotonic(), first_counts=first_counts)
        if bar_s:
            self.output.say(f"{name} is tried again in {bar_s:g} s")

    def _let_go(self, name: str, member: Member) -> None:
        self.output.say(f"{name} leaves the job")
        member.link.send({"forget": True})
        self._forget(member.link)

    def _forget(self, link: AgentLink) -> None:
        """Take a link out of everything; it is not waited for here."""
        for descriptor in (link.fileno(), link.stderr_fileno()):
            if descriptor in self.selector.get_map():
                self.selector.unregister(descriptor)
        link.close()
        self.leaving.append(link)
        if (member := self._member(link)) is not None:
            del self.members[link.host], self._links[member.link.host]

    def _member(self, link: AgentLink) -> Member | None:
        member = self.members.get(link.host)
        return member if member is not None and member.link is link else None

    def _read(self, link: AgentLink) -> None:
        super()._read(link)
        member = self._member(link)
        if member is None:
            return
        member.heard_s = time.monotonic()
        if member.state == "starting" and link.facts is not None:
            member.state, member.since_s = "preparing", time.monotonic()
            if (why := self._why_unreachable(link)) is not None:
                self.output.say(f"{link.host} cannot be used: {why}")
                self._lose(link)
                return
            link.send(self._work(link, self._env_for(link), {}, preload_work()), is_work=True)

    def _why_unreachable(self, link: AgentLink) -> str | None:
        """Why the ranks of a host could not reach those of others, which is known from here."""
        others = [name for name in self.wanted if name != link.host]
        if not others or link.facts is None:
            return None
        if link.is_local and link.facts.own_address is None:
            with suppress(OSError):  # it was alone when its agent began
                link.facts = replace(link.facts, own_address=route_to(others[0]).own_address)
        try:
            choose_interface(link.host, link.facts, self.plan.options.network_interface)
            if not link.is_local:
                launcher_address(link.host, link.facts)
        except LaunchError as error:
            return str(error)
        return None

    def routes(self, hosts: Sequence[Host]) -> None:
        """LaunchError if ranks of these hosts cannot reach each other, as far as known here."""
        for host in hosts if len(hosts) > 1 else ():
            why = self._why_unreachable(self.members[host.name].link)
            if why is not None:
                raise LaunchError(why)

    def _work(self, link: AgentLink, env: Mapping[str, str], ranks: Mapping[int, Any],
              preload: Any) -> dict[str, Any]:
        commits = commits_folder(self.plan, link.host)
        return super()._work(link, {**env, COMMITS_VARIABLE: commits}, ranks, preload) | {
            "commits": commits, "keep_s": self.plan.options.elastic.timeout_s}

    def _take(self, link: AgentLink, message: dict[str, Any], payload: bytes) -> None:
        member = self._member(link)
        if message.get("type") == "alive":
            return
        if message.get("type") not in ("ready", "idle") or member is None:
            super()._take(link, message, payload)
            return
        member.commit, member.busy = int(message["commit"]), False
        if message["type"] == "ready":
            member.state = "ready"
            if not self.timeline.has(link.host, member.commit):
                link.send({"discard": True})
                member.commit = 0
        self.look()

    def _lose(self, link: AgentLink) -> None:
        """An agent, or its host, is gone."""
        member = self._member(link)
        if member is None:
            return
        was = member.state
        self._forget(link)
        self._bar(link.host, "" if was == "ready" else why_ended(link),
                  first_counts=was != "ready")
        if member.busy:
            super()._lose(link)  # tells how its ranks have ended
        self.look()


def commits_folder(plan: LaunchPlan, host: str) -> str:
    """The folder in a host's memory for the commits of a job, the same for its next launcher."""
    text = "\0".join((os.getcwd(), *plan.argv, os.environ.get("SLURM_JOB_ID", ""), host,
                      *(f"{name}={value}" for name, value in sorted(plan.env.items()))))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{_MEMORY}/hvdtrain-{os.geteuid()}-{digest}"
