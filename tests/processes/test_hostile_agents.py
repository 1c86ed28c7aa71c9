"""An agent of another host that does not do what an agent does. Real processes, real pipes."""

from __future__ import annotations

import io
import json
import selectors
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from hvdtrain.launch import bring_up
from hvdtrain.launch.agent import MARK
from hvdtrain.launch.link import AgentLink
from hvdtrain.launch.native import NativeJob
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.launch.output import RankOutput
from hvdtrain.launch.plan import make_plan
from hvdtrain.process import SignalInbox
from hvdtrain.rendezvous.secret import SECRET_VARIABLE, new_secret
from tests.launch_facts import facts

LIMIT_S = 10.0
FACTS = {"time": 0.0, "interfaces": {"eth0": "127.0.0.1", "odd": "0.0.0.0/0", "worse": "x; y"},
         "own_address": "127.0.0.1", "ssh_client": "127.0.0.1", "ssh_server": None}


def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, start_new_session=True)


@pytest.mark.parametrize("said", [
    b"no json\n", b"[1]\n", b'{"size": -1}\n', b'{"size": "9"}\n', b'{"size": 1e9}\n',
    b'{"size": 99999999999}\n', b"x" * (2 << 20)])
def test_what_no_agent_sends_ends_the_link_and_is_told(said: bytes) -> None:
    program = (f"import sys; sys.stdout.buffer.write({MARK + json.dumps(FACTS).encode()!r} + "
               f"b'\\n' + {said[:40]!r} * {max(1, len(said) // 40)}); sys.stdout.flush(); "
               "sys.stdin.read()")
    link = AgentLink("other", [], None)
    link.start(lambda command: start([sys.executable, "-I", "-S", "-c", program]))
    deadline = time.monotonic() + LIMIT_S
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while selector.select(LIMIT_S) and link.read() is not None:
            assert time.monotonic() < deadline
    link.reap(1.0)
    assert "it sent what no agent sends" in link.last_words[-1]


def test_so_many_logins_at_once_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seven hosts, three at a time; one of them says nothing, and one ends at once."""
    monkeypatch.setattr(bring_up, "_ANSWER_LIMIT_S", 1.5)
    links = {name: AgentLink(name, [], None) for name in "abcdefg"}
    most, broken = 0, iter(["import sys; sys.stdin.read()", "raise SystemExit(9)"])

    def begin(command: Sequence[str]) -> subprocess.Popen[bytes]:
        nonlocal most
        waiting = sum(link._process is not None and link.facts is None for link in links.values())
        most = max(most, waiting + 1)
        program = next(broken, None)
        return start(command if program is None else [sys.executable, "-c", program])

    problems = bring_up.await_facts(links, lambda link: link.start(begin), lambda silent: False,
                                   at_once=3)
    for link in links.values():
        link.reap(1.0)
    assert most == 3
    assert sorted(problems) == ["a", "b"]
    assert problems["a"].startswith("no answer in 1.5 s")
    assert problems["b"].startswith("exit code 9")
    assert all(links[name].facts is not None for name in "cdefg")


HOSTILE = f"""
import json, os, sys, time
def send(message, payload=b""):
    os.write(1, json.dumps(message).encode() + b"\\n" + payload)
os.write(1, {MARK!r} + json.dumps({FACTS!r}).encode() + b"\\n")
for _ in range(10):  # what comes before the ranks are started is not read
    for rank in (0, 7, -1, "0", None):
        send({{"type": "output", "rank": rank, "stream": "stdout", "size": 6}}, b"forged")
        send({{"type": "exit", "rank": rank, "code": 9, "time": time.time(), "reason": ""}})
    time.sleep(0.1)
send({{"type": "exit", "rank": 1, "code": 0, "time": time.time(), "reason": ""}})
sys.stdin.read()
"""


def test_an_agent_speaks_for_the_ranks_of_its_own_host_only() -> None:
    plan = make_plan(LaunchOptions(command=("/bin/sh", "-c", "sleep 1; echo mine"),
                                   hosts="localhost:1,other:1", starter="native",
                                   network_interface=("lo", "eth0")), {}, facts())
    out, err = io.StringIO(), io.StringIO()
    sources: list[str] = []

    class Job(NativeJob):
        def start_process(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
            hostile = command[0] == "ssh"
            return start([sys.executable, "-I", "-S", "-c", HOSTILE] if hostile else command)

        def open_rendezvous(self, addresses: Collection[str],
                            those: Sequence[str]) -> dict[str, int]:
            sources.extend(those)
            return dict.fromkeys(addresses, 1)

    output: Any = RankOutput(2, out=out, err=err, directory=None, verbose=True)
    with SignalInbox() as inbox:
        end = Job(plan, output, {SECRET_VARIABLE: new_secret()}).run(inbox)
    output.close()
    assert end.code == 0, (end.report, err.getvalue())
    assert "mine" in out.getvalue()
    assert "forged" not in out.getvalue()
    assert "other: its agent speaks for rank 0, which is not there" in err.getvalue()
    assert all(source.count(".") == 3 and "/" not in source for source in sources)
