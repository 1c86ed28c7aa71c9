"""The cluster of the other tests is what it claims to be."""

import signal
import time

from tests.cluster.hosts import VirtualHosts
from tests.cluster.slurm import PrivateSlurm


def test_hosts_reach_each_other_by_ssh(hosts: VirtualHosts) -> None:
    done = hosts.run("hosta", ["ssh", "-o", "StrictHostKeyChecking=accept-new", "hostb",
                               "hostname; cat /etc/hostname"])
    assert (done.returncode, done.stdout.split()) == (0, ["hostb", "hostb"])


def test_processes_are_those_of_one_host(hosts: VirtualHosts) -> None:
    sleeper = hosts.start("hostb", ["sleep", "54321"])
    try:
        deadline = time.monotonic() + 5
        while not hosts.processes("hostb", "54321") and time.monotonic() < deadline:
            time.sleep(0.02)
        assert list(hosts.processes("hostb", "54321").values()) == ["sleep 54321"]
        assert hosts.processes("hosta", "54321") == {}
        hosts.signal("hostb", "54321", signal.SIGKILL)
    finally:
        sleeper.communicate(timeout=5)
    assert hosts.processes("hostb", "54321") == {}


def test_a_cut_host_is_not_reached_until_it_is_joined(fragile_hosts: VirtualHosts) -> None:
    ping = [
        "bash", "-c", "exec 3<>/dev/tcp/hostc/22 && head -c4 <&3"]
    fragile_hosts.cut("hostc")
    started = fragile_hosts.start("hosta", ["timeout", "1", *ping])
    assert "SSH-" not in started.communicate(timeout=10)[0]
    fragile_hosts.join("hostc")
    assert "SSH-" in fragile_hosts.run("hosta", ["timeout", "5", *ping]).stdout


def test_a_crashed_host_has_no_processes(fragile_hosts: VirtualHosts) -> None:
    assert fragile_hosts.processes("hostb", "sshd")
    fragile_hosts.crash("hostb")
    assert fragile_hosts.processes("hostb", "sshd") == {}


def test_slurm_starts_tasks_on_both_nodes(slurm: PrivateSlurm) -> None:
    done = slurm.run(["srun", "--mpi=none", "-N2", "--ntasks-per-node=2", "hostname"])
    assert sorted(done.stdout.split()) == ["hosta", "hosta", "hostb", "hostb"]
