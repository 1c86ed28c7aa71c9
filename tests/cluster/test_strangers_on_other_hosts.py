"""A job on two hosts, and a stranger on a third: where the job listens, and to whom."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster.hosts import VirtualHosts
from tests.processes.test_strangers import variables
from tests.stranger import WAYS

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S, SSHD = 30.0, 22
ON_THE_SAME_HOST = ("listen", "read the secret", "signal", "write to the agent")


def await_step(folder: Path, wanted: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not (folder / "step").exists() or int((folder / "step").read_text()) < wanted:
        assert time.monotonic() < deadline, "the job stands still"
        time.sleep(0.05)


def listening(pid: int) -> dict[str, int]:
    """All TCP sockets that listen on the host of a process: addresses and ports."""
    found = {}
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        address, _, port = line.split()[1].partition(":")
        if line.split()[3] == "0A":
            number = ".".join(str(byte) for byte in reversed(bytes.fromhex(address)))
            found[f"{number}:{int(port, 16)}"] = int(port, 16)
    return found


def test_a_third_host_reaches_nothing_of_a_job(fragile_hosts: VirtualHosts, tmp_path: Path) -> None:
    hosts = fragile_hosts
    hosts.interface("hosta", "other0", "10.99.1.1/16")  # a network that is none of the job's
    process = hosts.start("hosta", [
        sys.executable, "-m", "hvdtrain", "launch", "-H", "hosta:1,hostb:1", "-v", "--",
        sys.executable, "-m", "tests.steady_rank", str(tmp_path)], cwd=ROOT)
    try:
        await_step(tmp_path, 1)
        _try_all(hosts, tmp_path)
        (tmp_path / "stop").touch()
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, out
        assert out.count("done, ") == 2, out
    finally:
        hosts.signal("hosta", "hvdtrain launch", signal.SIGKILL)
        process.communicate()


def _rank_on(hosts: VirtualHosts, name: str) -> int:
    """The process of the rank on a host."""
    return next(pid for pid in hosts.processes(name, "tests.steady_rank")
                if "HOROVOD_RANK" in variables(pid))


def _try_all(hosts: VirtualHosts, folder: Path) -> None:
    own, environ = hosts.address("hosta"), variables(_rank_on(hosts, "hostb"))
    rendezvous = int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    assert environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].startswith(f"{own}:{rendezvous}/")
    sockets = {place: port for place, port in listening(_rank_on(hosts, "hosta")).items()
               if port != SSHD}
    # The rank beside the launcher goes to the loopback address, that on hostb to eth0's.
    assert {place.partition(":")[0] for place in sockets} == {"127.0.0.1", own}
    watchdog, = {port for place, port in sockets.items() if place.startswith(own)} - {rendezvous}
    lines = [line for name in hosts.names for line in hosts.processes(name).values()]
    assert not [line for line in lines if environ["HVDTRAIN_SECRET"] in line]
    target = {"address": own, "rendezvous": rendezvous, "watchdog": watchdog,
              "sources": [hosts.address("hostc")], "needles": [], "pids": []}
    ways = [way for way in WAYS if not way.startswith(ON_THE_SAME_HOST)]
    stranger = subprocess.Popen(
        hosts.enter("hostc", [sys.executable, "-I", "-S", str(ROOT / "tests/stranger.py")]),
        text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    said, _ = stranger.communicate("\n".join([json.dumps(target), *ways, ""]), timeout=120)
    achieved = dict(zip(ways, map(json.loads, said.splitlines()), strict=True))
    assert {way: found for way, found in achieved.items() if found} == {}
    await_step(folder, int((folder / "step").read_text()) + 3)
