"""`hvdtrain launch --ssh-fanout 2` on eight ssh hosts: from hosta to b and f, and so on.

    a - b - c - d
      |   ` e
      ` f - g
          ` h
"""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from hvdtrain.launch.tree import parents_of
from tests.cluster.hosts import VirtualHosts
from tests.cluster.test_launch_hosts import LAUNCH, ROOT, WAITING, assert_gone, launch, shell, start

ALL = ",".join(f"host{letter}:1" for letter in "abcdefgh")
WORDS = ("-H", ALL, "--ssh-fanout", "2")
WAITS = "echo up >&2; exec sleep 60"


@pytest.fixture(scope="module")
def grove() -> Iterator[VirtualHosts]:
    """Eight hosts, for tests that leave them as they were."""
    with VirtualHosts(8) as made:
        yield made


@pytest.fixture
def fragile_grove() -> Iterator[VirtualHosts]:
    """Eight hosts of the test's own."""
    with VirtualHosts(8) as made:
        yield made


@pytest.fixture
def mark() -> str:
    return f"mark{os.urandom(16).hex()}"


def clients(hosts: VirtualHosts) -> dict[str, int]:
    """How many ssh each host runs."""
    return {name[-1]: sum(command.startswith("ssh -o") for command in
                          hosts.processes(name).values()) for name in hosts.names}


def test_the_way_to_each_host() -> None:
    assert parents_of("bcdefgh", 2) == {"b": None, "f": None, "c": "b", "e": "b", "g": "f",
                                        "h": "f", "d": "c"}
    assert parents_of("bc", 2) == parents_of("bc", 9) == {"b": None, "c": None}
    ways = parents_of([str(n) for n in range(1000)], 8)
    assert len(ways) == 1000
    assert max(list(ways.values()).count(parent) for parent in {*ways.values()}) == 8


def test_ranks_start_by_a_tree_and_hear_signals(grove: VirtualHosts, mark: str) -> None:
    process = start(grove, *WORDS, *shell(WAITING, mark), ranks=8)
    assert clients(grove) == {"a": 2, "b": 2, "c": 1, "d": 0, "e": 0, "f": 2, "g": 0, "h": 0}
    grove.signal("hosta", "hvdtrain launch", signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode in (0, 143), out
    assert "not reached" not in out
    assert_gone(grove, mark)
    assert_gone(grove, "hvdtrain-hop")


def test_much_output_of_all_hosts_arrives_whole(grove: VirtualHosts, mark: str) -> None:
    program = ("import os\nfor i in range(4000): print(os.environ['HOROVOD_RANK'], i, 'x' * 50)")
    done = launch(grove, *WORDS, "-v", "--", sys.executable, "-c", program, mark, timeout=60.0)
    assert done.returncode == 0, done.stdout[-2000:]
    lines = re.findall(r"^\[\d\] (\d) (\d+) x{50}$", done.stdout, flags=re.MULTILINE)
    for rank in "01234567":
        assert [int(i) for own, i in lines if own == rank] == list(range(4000))


def test_a_rank_that_breaks_far_away_is_named(grove: VirtualHosts, mark: str) -> None:
    process = start(grove, *WORDS, *shell(
        "echo up >&2; if [ $HOROVOD_RANK = 3 ]; then sleep 0.5; echo bad >&2; exit 7; fi; "
        "exec sleep 60", mark), ranks=8)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 7, out
    assert re.search(r"rank 3 on hostd failed .*exit code 7", out)
    assert_gone(grove, mark)


def test_a_stopped_launcher_stops_its_ranks_and_goes_on(grove: VirtualHosts, mark: str) -> None:
    """Ctrl-Z, longer than the leases of agents and hops would allow."""
    text = "echo up >&2; for i in $(seq 40); do sleep 0.05; done; echo done >&2"
    process = start(grove, *WORDS, *shell(text, mark), ranks=8)
    grove.signal("hosta", "hvdtrain launch", signal.SIGTSTP)
    time.sleep(14.0)
    grove.signal("hosta", "hvdtrain launch", signal.SIGCONT)
    process.send_signal(signal.SIGCONT)  # nsenter stops with what it has started
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out.count("done\n")) == (0, 8), out


def test_nothing_outlives_a_launcher_that_is_killed(grove: VirtualHosts, mark: str) -> None:
    process = start(grove, *WORDS, *shell(WAITS, mark), ranks=8)
    grove.signal("hosta", "hvdtrain launch", signal.SIGKILL)
    process.communicate(timeout=20)
    assert_gone(grove, mark, within_s=5.0)
    assert_gone(grove, "hvdtrain-hop")


def test_a_hop_that_is_killed_ends_the_job_in_its_host_s_name(grove: VirtualHosts, mark: str
                                                              ) -> None:
    process = start(grove, *WORDS, *shell(WAITS, mark), ranks=8)
    assert grove.signal("hostb", "hvdtrain-hop", signal.SIGKILL)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 255, out
    assert re.search(r"rank 1 on hostb failed .*the connection to hostb was lost", out)
    assert_gone(grove, mark)


def test_hosts_that_may_not_log_in_to_each_other_are_reached_from_here(
        fragile_grove: VirtualHosts, mark: str) -> None:
    """From hostb no ssh works. hostf answers not at all, and is named."""
    fragile_grove.run("hostb", ["mount", "--bind", "/bin/false", "/usr/bin/ssh"])
    done = launch(fragile_grove, *WORDS, *shell("echo here >&2", mark), timeout=60.0)
    assert (done.returncode, done.stdout.count("here\n")) == (0, 8), done.stdout
    assert re.search(r"3 of the hosts were not reached by way of others.*; host[cde]: exit code 1,",
                     done.stdout)
    fragile_grove.run("hostf", ["bash", "-c", "kill $(pgrep -o sshd)"])
    done = launch(fragile_grove, *WORDS, *shell("echo here >&2", mark), timeout=60.0)
    assert done.returncode == 3, done.stdout
    assert "1 of the hosts cannot be used" in done.stdout
    assert "hostf: exit code 255, ssh: connect to host hostf" in done.stdout
    assert "here" not in done.stdout.splitlines()


def test_a_host_in_the_middle_that_dies_is_named(fragile_grove: VirtualHosts, mark: str) -> None:
    process = start(fragile_grove, *WORDS, *shell(WAITS, mark), ranks=8)
    began = time.monotonic()
    fragile_grove.crash("hostb")
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 255, out
    assert re.search(r"rank 1 on hostb failed .*the connection to hostb was lost", out)
    assert time.monotonic() - began < 8.0
    assert_gone(fragile_grove, mark)


def test_a_host_in_the_middle_whose_cable_is_cut_is_named(fragile_grove: VirtualHosts, mark: str
                                                          ) -> None:
    process = start(fragile_grove, *WORDS, *shell(WAITS, mark), ranks=8)
    fragile_grove.cut("hostb")
    began = time.monotonic()
    out, _ = process.communicate(timeout=40)
    assert process.returncode == 255, out
    assert re.search(r"rank 1 on hostb failed .*the connection to hostb was lost", out)
    assert_gone(fragile_grove, mark, within_s=35.0 - (time.monotonic() - began))


def test_other_starters_have_a_tree_of_their_own_or_none(grove: VirtualHosts, mark: str) -> None:
    done = grove.run("hosta", [*LAUNCH, *WORDS, "--starter", "horovodrun", "--dry-run",
                               *shell("true", mark)], cwd=ROOT)
    assert done.returncode == 2
    assert "--ssh-fanout is of the starter native" in done.stdout
