"""`Crew`: the agents of all hosts. No rank starts before every agent is up."""

from __future__ import annotations

import ipaddress
import os
import selectors
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hvdtrain.errors import EXIT_NOT_STARTED, MachineError
from hvdtrain.hosts import rank_variables
from hvdtrain.launch.link import LEASE_S, AgentLink, HostFacts, StartProcess
from hvdtrain.launch.network import choose_interface, launcher_address
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.waiting import WaitingWords
from hvdtrain.preload import client as preload_client
from hvdtrain.preload.client import SOCKET_VARIABLE
from hvdtrain.preload.server import server_command
from hvdtrain.world.detect import HOSTS_VARIABLE
from hvdtrain.world.rendezvous import gloo_variables
from hvdtrain.world.secret import SECRET_VARIABLE, JobKey

OpenRendezvous = Callable[[Sequence[str], Sequence[str]], Mapping[str, int]]
"""From addresses of this host and the addresses of those who may come to the port at each."""

_ANSWER_LIMIT_S = 60.0
"""For a host that takes the connection and says nothing more (a hanging home directory)."""
_RETRY_S = 1.0
_PEERS = 3
"""Hosts that each agent looks up; a name that it does not know may be at fault itself."""
_POLL_S = 0.1
_REAP_S = 2.0

# They belong to this host, this terminal or this login.
_OF_THIS_HOST = {"HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "DISPLAY", "WINDOWID", "XAUTHORITY",
                 SOCKET_VARIABLE}
_OF_THIS_LOGIN = ("SSH_", "XDG_", "BASH_FUNC_", "DBUS_SESSION_")


class Crew:
    """One link per host of a plan.

    Args:
        plan: The plan.
        stdin: Integer, a descriptor that the agent of this host has, for the standard input of
            its ranks. None: they have none.
    """

    def __init__(self, plan: LaunchPlan, stdin: int | None = None) -> None:
        self._plan = plan
        self._stdin = stdin
        hosts = list(dict.fromkeys(slot.host for slot in plan.slots))
        self._addresses: dict[str, str] = {}
        """Of this launcher, as each host sees it."""
        self._several = len(hosts) > 1
        self.links = {
            host: AgentLink(host, [other for other in hosts if other != host][:_PEERS],
                            None if host in plan.local_hosts else plan.remote)
            for host in hosts}

    def bring_up(self, start: StartProcess, interrupted: Callable[[], bool],
                 say: Callable[[str], None]) -> bool:
        """Start all agents and wait until each has told its facts.

        Args:
            start: Starts a process with pipes on its three streams.
            interrupted: Tells whether to give up.
            say: Writes a line to the user: for which hosts the launcher waits.

        Returns:
            False when it was interrupted.

        Raises:
            MachineError: Hosts that cannot be reached, each with the reason.
        """
        started = time.monotonic()
        pending = dict(self.links)
        problems: dict[str, str] = {}
        waiting = WaitingWords(say)

        def give_up(silent: Iterable[str]) -> bool:
            waiting.tick(lambda: "; ".join(
                f"{host} ({problems.get(host, 'no answer yet')})" for host in silent))
            return interrupted()

        while pending and not interrupted():
            for link in pending.values():
                link.start(start)
            failed = self._await_facts(pending.values(), give_up)
            problems = {host: text for host, text in failed.items() if text}
            pending = {host: self.links[host] for host in problems}
            if problems and time.monotonic() - started > self._plan.start_timeout_s:
                raise MachineError(_unreachable(problems, self._plan.start_timeout_s))
            if problems and not give_up(problems):
                time.sleep(_RETRY_S)
        return not interrupted()

    def launcher_addresses(self) -> list[str]:
        """The addresses of this host at which the ranks find it, each once.

        Raises:
            LaunchError: The name of a host cannot be resolved here.
        """
        self._addresses = {host: "127.0.0.1" if link.is_local
                           else launcher_address(host, _facts(link))
                           for host, link in self.links.items()}
        return list(dict.fromkeys(self._addresses.values()))

    def sources(self) -> list[str]:
        """The addresses and networks from which ranks may come."""
        found = [item for item in self._plan.network_interface if "/" in item]
        for link in self.links.values():
            facts = _facts(link)
            for address in (*facts.interfaces.values(), facts.ssh_server or ""):
                with suppress(ValueError):  # IPv6, or none
                    found.append(str(ipaddress.IPv4Address(address)))
        return list(dict.fromkeys(found))

    def send_work(self, env: Mapping[str, str], ports: Mapping[str, int]) -> None:
        """Tell each agent what to start.

        Args:
            env: The environment that all ranks share, with the secret of the job.
            ports: Of the rendezvous, at each of `launcher_addresses`.

        Raises:
            LaunchError: A host has no usable network interface.
        """
        interfaces = {host: self._interface(link) for host, link in self.links.items()}
        preload, key = self._preload(), JobKey(env[SECRET_VARIABLE])
        counts = {slot.host: slot.local_size for slot in self._plan.slots}
        everyone = ",".join(f"{host}:{count}" for host, count in counts.items())
        for host, link in self.links.items():
            interface, address = interfaces[host], self._addresses[host]
            shared = ({"NCCL_SOCKET_IFNAME": interface} | _for_host(env, link)
                      | gloo_variables(address=address, port=ports[address], interface=interface,
                                       key=key) | {HOSTS_VARIABLE: everyone})
            ranks = {slot.rank: shared | rank_variables(slot, self._plan.np)
                     for slot in self._plan.slots if slot.host == host}
            link.send_work({"command": self._plan.argv, "directory": os.getcwd(), "ranks": ranks,
                            "grace_s": self._plan.grace_s, "preload": preload,
                            "stdin": self._stdin if link.is_local else None,
                            # On this host the end of the launcher closes the pipe.
                            "lease_s": 0 if link.is_local else LEASE_S})

    def _preload(self) -> dict[str, object] | None:
        """What an agent needs to take its ranks from a preloaded process."""
        if not self._plan.preload:
            return None
        return {"server": server_command(),
                "client": Path(preload_client.__file__).read_text(encoding="utf-8")}

    def send(self, message: dict[str, object]) -> None:
        """Send a control message to every agent."""
        for link in self.links.values():
            link.send(message)

    def close(self) -> None:
        """Make every agent end what is left, and wait for them for a moment."""
        for link in self.links.values():
            link.close()
        deadline = time.monotonic() + _REAP_S
        for link in self.links.values():
            link.reap(max(0.1, deadline - time.monotonic()))

    def _interface(self, link: AgentLink) -> str:
        """The interface of a host for the traffic between the ranks."""
        if not self._several:
            return "lo"  # the ranks of one host talk over its loopback interface
        return choose_interface(link.host, _facts(link), self._plan.network_interface)

    @staticmethod
    def _await_facts(links: Iterable[AgentLink],
                     give_up: Callable[[Iterable[str]], bool]) -> dict[str, str]:
        """For each host why it did not tell its facts, "" where it did."""
        waiting = {link.host: link for link in links}
        result: dict[str, str] = {}
        deadline = time.monotonic() + _ANSWER_LIMIT_S
        with selectors.DefaultSelector() as selector:
            for link in waiting.values():
                selector.register(link, selectors.EVENT_READ, link)
            while waiting and not give_up(waiting) and time.monotonic() < deadline:
                for key, _ in selector.select(_POLL_S):
                    link = key.data
                    ended = link.read() is None
                    if link.facts is not None or ended:
                        selector.unregister(link)
                        result[link.host] = "" if link.facts is not None else _why(link)
                        del waiting[link.host]
        for link in waiting.values():
            link.reap(0.0)
            result[link.host] = (f"no answer in {_ANSWER_LIMIT_S:g} s. Does a login script there "
                                 "wait for something?")
        return result


def _facts(link: AgentLink) -> HostFacts:
    if link.facts is None:
        raise RuntimeError(f"{link.host} has not told its facts")
    return link.facts


def _why(link: AgentLink) -> str:
    """Why an agent ended before it said anything."""
    code = link.reap(_REAP_S)
    words = "; ".join(link.last_words) or "it said nothing"
    if code == EXIT_NOT_STARTED:
        return (f"{words}. Expected this Python at the same path there: a shared file system, "
                "or the same installation on every host")
    return f"exit code {code}, {words}"


def _unreachable(problems: Mapping[str, str], waited_s: float) -> str:
    lines = [f"  {host}: {text}" for host, text in problems.items()]
    first = next(iter(problems))
    after = f" after {waited_s:g} s" if waited_s else ""
    return (f"{len(problems)} of the hosts cannot be used{after}, so no rank was started:\n"
            + "\n".join(lines)
            + f"\nExpected that this works without a question: ssh -o BatchMode=yes {first} true. "
              f"`hvdtrain doctor -H {','.join(problems)}` looks closer.")


def _for_host(env: Mapping[str, str], link: AgentLink) -> dict[str, str]:
    if link.is_local:
        return dict(env)
    return {name: value for name, value in env.items()
            if name not in _OF_THIS_HOST and not name.startswith(_OF_THIS_LOGIN)}
