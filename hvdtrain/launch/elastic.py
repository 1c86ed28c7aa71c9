"""A job whose ranks and hosts come and go: it ends all ranks and starts others, which go on.

The ranks between two changes are a *world*. Each host has an agent that stays (`elastic_hosts.py`),
with a preloaded process from which ranks are forked, and a folder in memory where they commit their
state (`train/commits.py`). After a failure all ranks are killed; before a change that can wait they
are asked to commit and end. No rank negotiates with one that may be dead. `worlds.py` decides.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from hvdtrain.commit_names import ENDING_VARIABLE, FIRST_VARIABLE, WORLD_VARIABLE
from hvdtrain.errors import (
    EXIT_HOST_LOST,
    EXIT_MACHINE,
    EXIT_NOT_FINITE,
    EXIT_NOT_WRITTEN,
    EXIT_RANKS_DIFFER,
    EXIT_SIGNALLED,
    EXIT_STOPPED,
    EXIT_TOO_FEW,
    EXIT_USAGE,
    HvdtrainError,
)
from hvdtrain.hosts import Host, assign_ranks
from hvdtrain.launch.discovery import Discovery
from hvdtrain.launch.elastic_hosts import ElasticHosts
from hvdtrain.launch.link import CUT_OFF_END_S
from hvdtrain.launch.output import RankOutput, WaitingNotice
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.running_job import GIVE_UP_S, JobEnd, RankEnd
from hvdtrain.launch.worlds import Bar, change_text, next_world
from hvdtrain.process import SignalInbox, allow_open_files, signal_name

_FILES = 4096
_TICK_S, _SETTLE_S = 0.25, 1.0  # hosts that come together make one change
_CHANGE_S, _ENDING_S, _KILL_S = 30.0, 120.0, 1.0
_CAUSE_S, _SECONDARY_S = 0.05, 1.0
_SAME_FAILURES = 3
_OF_THE_JOB = {EXIT_USAGE, EXIT_MACHINE, EXIT_NOT_FINITE, EXIT_RANKS_DIFFER, EXIT_NOT_WRITTEN}
"""Codes of errors that another world would have too."""
_TOLD = ("signal", "timeout")
"""Reasons to stop that end the job."""


class ElasticJob(ElasticHosts):
    """One job. `plan` has its command and options; `is_local` tells names of this host."""

    def __init__(self, plan: LaunchPlan, output: RankOutput, env: Mapping[str, str],
                 discovery: Discovery, is_local: Callable[[str], bool]) -> None:
        super().__init__(plan, output, env, discovery, is_local)
        self._world, self._hosts = 0, tuple[Host, ...]()
        self._first_ranks = 0  # those of the first world
        self._is_running = self._is_done = False
        self._why = "the start"
        self._asked = False  # the ranks, to end for a change
        self._asked_to_save = False  # by SIGUSR1, which `fit` answers with a checkpoint
        self._better_s: float | None = None  # since when another world is better
        self._few_s: float | None = None  # since when there are too few ranks
        self._not_before_s = 0.0  # until then a world may go on that cannot be reached
        self._notice: WaitingNotice | None = None
        self._ending: tuple[str, ...] = ()
        self._alike = 0
        self._last_failure: tuple[int, str] | None = None

    def run(self, inbox: SignalInbox) -> JobEnd:
        """Start worlds until one has ended well, or no further one can."""
        self._former_files = allow_open_files(_FILES)
        with self._resources, self.selector:
            self._resources.callback(self.discovery.close)
            try:
                self.meet()
                self.discovery.start()
                self.watch(self.discovery, self.hosts_changed)
                self._tick()
                self.serve(inbox)
            finally:
                self.close_all(forget=self._is_done)
        if self._ending:
            return JobEnd(code=EXIT_TOO_FEW, report=self._ending)
        if not self._world:
            return JobEnd(code=EXIT_SIGNALLED + self.signal, signal=self.signal, report=(
                f"ended by {signal_name(self.signal)} before the ranks started",))
        return self._end()

    def is_over(self) -> bool:
        """See `RunningJob.is_over`."""
        return self._is_done

    @property
    def _least(self) -> int:
        return self.plan.options.elastic.min_np or 1

    def _tick(self) -> None:
        self.arm("tick", _TICK_S, self._tick)
        self.meet()
        self.look()

    def look(self) -> None:
        """Start, end or change a world, where it is time."""
        if self._is_done:
            return
        if not self._is_running:
            self._try_world()
        elif len(self.ends) == self.plan.np and not any(
                member.busy for member in self.members.values()):
            self._world_is_over()
        elif not self.why_stopped and "change" not in self._deadlines:
            self._consider_change()

    def _possible(self) -> tuple[Host, ...]:
        """The hosts of the best world that is possible now; empty: too few ranks."""
        # Where training has gone on between failures, the job does not wait for barred slots.
        for all_slots in (False, True) if self._alike <= 1 else (False,):
            hosts = next_world(
                self.ready(all_slots=all_slots), self.commits, [host.name for host in self._hosts],
                least=self._least, most=self.plan.options.elastic.max_np or self.plan.options.np)
            if hosts:
                break
        return hosts

    def _try_world(self) -> None:
        now, waits = time.monotonic(), [
            name for name, member in self.members.items() if member.state != "ready"]
        if now < self._not_before_s:
            return
        hosts = () if self._world == 0 and waits else self._possible()  # each answers, or is lost
        if hosts:
            self._few_s = self._notice = None
            self._start_world(hosts)
            return
        self._few_s = self._few_s or now
        self._notice = self._notice or WaitingNotice(self.output.say)
        self._notice.tick(lambda: "hosts" + (
            f" ({', '.join(waits)} starting)" if waits else
            f": fewer than {self._least} ranks are possible"))
        if (now - self._few_s > self.plan.options.elastic.timeout_s and not (
                self._world == 0 and waits)) or self._asked_to_save:
            self._give_up_waiting()

    def _give_up_waiting(self) -> None:
        """Let the ranks that are possible save the state on disk."""
        self._ending = (
            f"fewer than --min-np {self._least} ranks for "
            f"{self.plan.options.elastic.timeout_s:g} s (--elastic-timeout)",)
        some = next_world(self.ready(taken=True), self.commits, (), least=1, most=None)
        if some and self._world:
            self._env = {**self._env, ENDING_VARIABLE: "1"}
            self._start_world(some)
            self.arm("change", _ENDING_S, partial(self.stop, "change", signal.SIGKILL, _KILL_S))
        else:
            self._is_done = True

    def _start_world(self, hosts: tuple[Host, ...]) -> None:
        slots, before = assign_ranks(hosts, sum(host.slots for host in hosts)), self._hosts
        self.plan = replace(self.plan, slots=slots)
        self.ends.clear()
        self.why_stopped, self.stopped_s, self._asked, self._better_s = "", None, False, None
        self.output.begin_again()
        first = self._first_ranks or len(slots)
        self._env = {**self._env, WORLD_VARIABLE: str(self._world + 1), FIRST_VARIABLE: str(first)}
        if self._asked_to_save:  # too late for the ranks of before
            self._env[ENDING_VARIABLE] = "1"
        try:
            self.routes(hosts)
            self._send_work()
        except (HvdtrainError, OSError) as error:
            new = [host.name for host in hosts if host.name not in {one.name for one in before}]
            if self._world == 0 or not new:
                raise
            for name in new:
                self._bar(name, str(error))
            return
        self._world, self._hosts, self._is_running = self._world + 1, hosts, True
        self._first_ranks = first
        self.timeline.begin(hosts, self.members[hosts[0].name].commit)
        for host in hosts:
            self.members[host.name].busy = True
        self.output.say(
            f"world {self._world}: {len(slots)} rank{'s' * (len(slots) > 1)} on "
            f"{self.plan.host_list} after {self._why}"
            + (f" ({change_text(before, hosts)}); from step "
               f"{self.timeline.began[-1]}" if before else ""))

    def _consider_change(self) -> None:
        possible, now, wanted = self._possible(), time.monotonic(), self.wanted
        leaves = [host.name for host in self._hosts if wanted.get(host.name, 0) < host.slots]
        # Where all hosts are replaced by others, those go on until one of these is ready.
        stays = not wanted or any(host.name in wanted for host in (*self._hosts, *possible))
        more = sum(host.slots for host in possible) - self.plan.np
        if not (leaves and stays) and (more <= 0 or self._asked):
            self._better_s = None
            return
        self._better_s = self._better_s or now
        if now - self._better_s < _SETTLE_S:
            return
        if leaves:
            self._why = f"{', '.join(leaves)} leave{'s' * (len(leaves) == 1)}"
            self.arm("change", _CHANGE_S, partial(self.stop, "change", signal.SIGKILL, _KILL_S))
        else:  # they may commit when they like
            self._why = f"{more} more rank{'s' * (more > 1)}"
        self._asked = True
        for host in self._hosts:
            if host.name in self._links:
                self._links[host.name].send({"change": True})

    def _world_is_over(self) -> None:
        self._is_running = False
        for name in ("failure", "kill", "give up", "change"):
            self._deadlines.pop(name, None)
        ends = list(self.ends.values())
        codes = {end.code for end in ends}
        if codes == {EXIT_HOST_LOST}:  # all ranks are out of reach, perhaps together
            self._not_before_s = time.monotonic() + CUT_OFF_END_S
            self.output.say(f"no host of this world can be reached: the next one begins in "
                            f"{CUT_OFF_END_S:g} s, when its ranks have ended by themselves")
        changed = self._asked and (EXIT_STOPPED in codes or codes == {0}) and (
            codes <= {0, EXIT_STOPPED, -signal.SIGKILL})
        saved = codes == {EXIT_STOPPED} and (not self._asked or self._asked_to_save)
        if self.why_stopped in _TOLD or saved or self._ending or codes == {0}:
            self._is_done = True
        elif not changed and self.why_stopped != "change" and not self._asked_to_save:
            self._judge(ends)
        self.look()

    def _judge(self, ends: list[RankEnd]) -> None:
        """After a failure: whether another world may be tried, and without which slot."""
        cause = self.first_failure(ends)
        if cause is None:
            return
        # The commits of a host that is lost are not known before it is back.
        failure = max(self.timeline.began[-1], *self.commits.values(), 0), cause.manner
        self._alike = self._alike + 1 if self._last_failure == failure else 1
        self._last_failure = failure
        told = {(end.code, end.record.error, end.record.message) if end.record else None
                for end in ends}
        all_alike = len(ends) > 1 == len(told) and None not in told and not cause.secondary
        is_of_the_job = cause.exit_code in _OF_THE_JOB and (
            cause.record is not None or self.plan.says_done)  # else a code of the script's own
        if is_of_the_job or all_alike or self._alike >= _SAME_FAILURES:
            self._is_done = True
            return
        self._why = f"rank {cause.rank} on {cause.host} failed: {cause.manner}"
        if cause.code != EXIT_HOST_LOST and cause.host in self.members:
            place = cause.host, self.plan.slots[cause.rank].local_rank
            bar_s = self.bars.slots.setdefault(place, Bar()).fail(time.monotonic())
            if bar_s:
                self.output.say(f"a slot of {cause.host} is left out for {bar_s:g} s, unless too "
                                "few are left: its rank failed again")

    # What `RunningJob` asks

    def send(self, number: int) -> None:
        """To all ranks; they are asked to save and end by SIGUSR1, if they are a `fit`."""
        if number == signal.SIGUSR1 and self.plan.says_done:
            self._asked_to_save = True
        super().send(number)

    def failure_wait_s(self, end: RankEnd) -> float:
        """Not long: the others cannot go on."""
        if end.code == EXIT_STOPPED:
            return min(self.plan.options.grace_s, _CHANGE_S)  # the others end too
        return _SECONDARY_S if end.secondary else _CAUSE_S

    def stop(self, why: str, number: int, grace_s: float) -> None:
        """After a failure nothing is left to save that is not committed."""
        if self.why_stopped in _TOLD and why not in _TOLD:
            return
        limit = self._deadlines.get("timeout")
        if why == "failure":
            number, grace_s = signal.SIGKILL, _KILL_S
        super().stop(why, number, grace_s)
        self._deadlines.pop("change", None)
        if limit is not None and why not in _TOLD:
            self._deadlines["timeout"] = limit
        if not self._is_running:  # told to end while it waits for hosts
            self._is_done = True

    def kill(self) -> None:
        """End what is left; a host that does not answer is lost."""
        self.send(signal.SIGKILL)
        self.arm("give up", GIVE_UP_S, self._give_up_hosts)

    def _give_up_hosts(self) -> None:
        for member in [member for member in self.members.values() if member.busy]:
            self._lose(member.link)
        if self.why_stopped in _TOLD:
            self._is_done = True

    def end_rank(self, rank: int, code: int, time_s: float, reason: str = "",
                 offset_s: float = 0.0) -> None:
        """See `RunningJob.end_rank`."""
        super().end_rank(rank, code, time_s, reason, offset_s)
        self.look()
