"""Real processes that find each other without a launcher: jobs side by side, and who waits."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.rendezvous.bootstrap import candidate_ports, start_bootstrap
from hvdtrain.rendezvous.secret import JobKey
from hvdtrain.world import detect_world

LIMIT_S = 20.0
SAYS_WITHIN_S, ENDS_WITHIN_S = 12.0, 2.0  # 5 s and at once, on a loaded machine
STARTERS = ("HOROVOD_", "OMPI_", "PMI", "SLURM_", "HVDTRAIN_", "TF_CONFIG")
HEAD = """
import os, sys, time
from hvdtrain import log
from hvdtrain.runtime import guard
from hvdtrain.rendezvous.bootstrap import bootstrap
from hvdtrain.rendezvous.barrier import exchange, open_rendezvous
from hvdtrain.rendezvous.barrier import rendezvous_barrier
from hvdtrain.rendezvous.client import RendezvousClient
from hvdtrain.world import detect_world
world = detect_world(os.environ)
log.configure(log.rank_prefix(world.rank, world.size, world.host))
"""
RANK = HEAD + """
with guard.install(world, os.environ):
    env = dict(os.environ) | bootstrap(world, os.environ, timeout_s=20)
    rendezvous_barrier(world, env, timeout_s=20)
    store = RendezvousClient.of(env, "hvdtrain.test")
    print("met", *exchange(store, world, "mark", os.environ["MARK"], timeout_s=20), flush=True)
    if world.is_chief:
        time.sleep(1.0)  # it serves the store
"""
UNDER_TENSORFLOW = HEAD + """
import socket
from hvdtrain.engines.tf_distribute.choice import find_cluster
with guard.install(world, os.environ):
    cluster = find_cluster(world, os.environ, timeout_s=60)
    own = cluster.addresses["worker"][cluster.task_index]
    listener = socket.create_server(("127.0.0.1", int(own.rpartition(":")[2])))  # as TensorFlow
    print("met", own, flush=True)
"""


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in held]
    for one in held:
        one.close()
    return ports


def environment(ports: list[int], index: int, **more: str) -> dict[str, str]:
    config = {"cluster": {"worker": [f"127.0.0.1:{port}" for port in ports]},
              "task": {"type": "worker", "index": index}}
    clean = {k: v for k, v in os.environ.items() if not k.startswith(STARTERS)}
    return clean | {"TF_CONFIG": json.dumps(config)} | more


def start(program: str, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], env=env, text=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def end(*processes: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    """Codes and outputs; a process that does not end in time is killed."""
    found, deadline = [], time.monotonic() + LIMIT_S
    for process in processes:
        try:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        found.append((process.returncode, out, err))
    return found


def test_two_jobs_on_one_host_do_not_mix() -> None:
    """They differ in the ports of TF_CONFIG only. B's chief is there before A's."""
    a, b = free_ports(2), free_ports(2)
    processes = [start(RANK, environment(b, 0, MARK="B")), start(RANK, environment(a, 1, MARK="A"))]
    time.sleep(1.0)
    processes += [start(RANK, environment(a, 0, MARK="A")),
                  start(RANK, environment(b, 1, MARK="B"))]
    said = [(code, out.strip(), err) for code, out, err in end(*processes)]
    assert [(code, out) for code, out, _ in said] == [
        (0, "met B B"), (0, "met A A"), (0, "met A A"), (0, "met B B")], said


def test_jobs_that_nothing_tells_apart_are_refused_by_name() -> None:
    """The second rank 0 and the second rank 1 end; the first ones go on."""
    ports = free_ports(3)
    first = [start(RANK, environment(ports, rank, MARK="first")) for rank in (0, 1)]
    time.sleep(1.5)
    twins = [start(RANK, environment(ports, rank, MARK="second")) for rank in (0, 1)]
    said = end(*twins)
    pids = [process.pid for process in first]
    last = start(RANK, environment(ports, 2, MARK="first"))
    assert [(code, out.strip()) for code, out, _ in end(*first, last)] == [
        (0, "met first first first")] * 3
    assert [code for code, _, _ in said] == [2, 2], said
    host = socket.gethostname()
    assert f"Rank 0 of this job is there already: process {pids[0]} on {host}" in said[0][2]
    assert f"127.0.0.1:{ports[0]}" in said[0][2]
    assert f"Rank 1 of this job is taken: process {pids[1]} on " in said[1][2]
    assert "HVDTRAIN_SECRET" in said[1][2]


def test_a_secret_tells_jobs_apart_that_nothing_else_does() -> None:
    ports = free_ports(2)
    processes = [start(RANK, environment(ports, rank, MARK=mark, HVDTRAIN_SECRET=mark * 16))
                 for mark in "AB" for rank in (0, 1)]
    said = end(*processes)
    assert [out.strip() for _, out, _ in said] == ["met A A"] * 2 + ["met B B"] * 2, said


def test_processes_of_tensorflow_meet_before_it_listens() -> None:
    """Each binds its own address of TF_CONFIG afterwards, rank 0 that of the meeting."""
    ports = free_ports(3)
    said = end(*(start(UNDER_TENSORFLOW, environment(ports, rank)) for rank in range(3)))
    assert [(code, out.strip()) for code, out, _ in said] == [
        (0, f"met 127.0.0.1:{port}") for port in ports], said


TWO_PROGRAMS = HEAD + """
rendezvous_barrier(world, os.environ, timeout_s=20)
store = open_rendezvous(world, os.environ, "hvdtrain.test")
print(*exchange(store, world, "mark", f"{sys.argv[1]}{world.rank}", timeout_s=20), flush=True)
"""


@pytest.mark.parametrize("between", ["; ", " || "])
def test_a_rank_may_run_one_program_after_the_other(tmp_path: Path, between: str) -> None:
    """Under one launcher, whose rendezvous still holds what the first program has put."""
    program = tmp_path / "program.py"
    code = "sys.exit(1)" if "|" in between else "pass"
    program.write_text(TWO_PROGRAMS + f"\nif sys.argv[1] == 'first':\n    {code}\n")
    line = between.join(f"{sys.executable} {program} {mark}" for mark in ("first", "second"))
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "launch", "-np", "2", "-v", "--", "sh", "-c", line],
        capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"[{rank}] first0 first1\n[{rank}] second0 second1\n" in "".join(
            f"{text}\n" for text in done.stdout.splitlines() if text.startswith(f"[{rank}]"))


def test_two_programs_of_one_rank_at_once_are_refused() -> None:
    line = f"{sys.executable} -c '{HEAD}rendezvous_barrier(world, os.environ); time.sleep(3)'"
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "launch", "-np", "2", "-v", "--", "sh", "-c",
         f"{line} & sleep 1; {line}"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert re.search(r"Rank [01] of this job is taken: process \d+ on localhost ", done.stderr)


UNDER_MPIRUN = """
import sys
from hvdtrain.launch.execute import launch
from hvdtrain.launch.facts import Mpirun
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.launch.plan import make_plan
from tests.launch_facts import facts
machine = facts(mpirun=Mpirun(path=sys.argv[1], flavour="openmpi", version="5.0.11"))
options = LaunchOptions(command=("prog",), np=2, starter="mpirun")
sys.exit(launch(make_plan(options, {}, machine)))
"""
WAITING = {
    "a rank without rank 0": (RANK, 1, r"Waiting for rank 0 on 127\.0\.0\.1, which serves the "
                              r"rendezvous at 127\.0\.0\.1, port \d+"),
    "a rank whose packets are dropped": (RANK, 1, r"Waiting for rank 0 on 127\.0\.0\.1, which "
                                         r"serves the rendezvous at 127\.0\.0\.1, port \d+"),
    "rank 0 without the others": (RANK, 0, r"Waiting for rank 1 on 127\.0\.0\.1, rank 2 on "
                                  r"127\.0\.0\.1: \d+ s so far, at most 20 s"),
    "a process of TensorFlow": (UNDER_TENSORFLOW, 1, r"Waiting for rank 0 on 127\.0\.0\.1, which "
                                r"serves the rendezvous at 127\.0\.0\.1, port \d+"),
    "rank 0 of TensorFlow": (UNDER_TENSORFLOW, 0, r"Waiting for rank 1 on 127\.0\.0\.1, rank 2"),
    "mpirun": ("", 0, r"waiting for mpirun \(process \d+\); no rank on localhost has written "
               "anything yet: 5 s so far"),
}


def held_ports(ports: list[int]) -> list[socket.socket]:
    """Sockets at all ports of a job's rendezvous whose queues are full: packets are dropped."""
    environ = environment(ports, 0)
    made = start_bootstrap(detect_world(environ), environ, timeout_s=5)
    assert made.server is not None
    made.server.close()
    held = []
    for port in candidate_ports(JobKey(made.variables["HVDTRAIN_SECRET"])):
        held.append(socket.create_server(("127.0.0.1", port), backlog=0))
        for _ in range(3):
            held.append(socket.socket())
            held[-1].setblocking(False)
            held[-1].connect_ex(("127.0.0.1", port))
    return held


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory
            ) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All of `WAITING`, started at once."""
    mpirun = tmp_path_factory.mktemp("bin") / "mpirun"
    mpirun.write_text("#!/bin/sh\nexec sleep 60\n")
    mpirun.chmod(0o755)
    made = {}
    ports = free_ports(3)
    deaf = held_ports(ports)
    for name, (program, rank, _) in WAITING.items():
        if "dropped" in name:
            made[name] = start(program, environment(ports, rank, MARK="x"))
        elif program:
            made[name] = start(program, environment(free_ports(3), rank, MARK="x"))
        else:
            made[name] = subprocess.Popen(
                [sys.executable, "-c", UNDER_MPIRUN, str(mpirun)], text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    yield made
    for one in deaf:
        one.close()
    for process in made.values():
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


@pytest.mark.parametrize("name", WAITING)
def test_who_waits_says_for_whom_and_heeds_sigterm(
        waiting: dict[str, subprocess.Popen[str]], name: str) -> None:
    process, wanted = waiting[name], re.compile(WAITING[name][2])
    seen = []
    assert process.stderr is not None
    silent = threading.Timer(SAYS_WITHIN_S, process.kill)
    silent.start()
    while line := process.stderr.readline():
        seen.append(line)
        if wanted.search(line):
            break
    silent.cancel()
    silent.join()
    assert seen, "it said nothing"
    assert wanted.search(seen[-1]), seen
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(LIMIT_S)
    assert time.monotonic() - began < ENDS_WITHIN_S
    assert code == (143 if name == "mpirun" else 75), process.stderr.read()
    if code == 75:
        assert "Stopped on request (SIGTERM) while waiting for rank" in process.stderr.read()
