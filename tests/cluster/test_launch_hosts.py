"""`hvdtrain launch` on real ssh hosts: places, faults, quoting, and that nothing is left anywhere.

The ranks are small programs without TensorFlow; each carries a mark on its command line.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import VirtualHosts

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = (sys.executable, "-m", "hvdtrain", "launch")
ALL = "hosta:1,hostb:1,hostc:1"
WAITING = "trap 'exit 0' TERM; echo up >&2; while :; do sleep 0.1; done"


@pytest.fixture
def mark() -> str:
    return f"mark{uuid.uuid4().hex}"


@pytest.fixture
def quiet_hosts(hosts: VirtualHosts, mark: str) -> Iterator[VirtualHosts]:
    """The shared hosts; afterwards no rank of the test may be left on any of them."""
    yield hosts
    assert_gone(hosts, mark)


def assert_gone(hosts: VirtualHosts, mark: str, within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    left = {}
    while time.monotonic() < deadline:
        left = {name: found for name in hosts.names if (found := hosts.processes(name, mark))}
        if not left:
            return
        time.sleep(0.05)
    raise AssertionError(f"ranks are left: {left}")


def launch(hosts: VirtualHosts, *words: str, timeout: float = 30.0, **kwargs: object
           ) -> subprocess.CompletedProcess[str]:
    return hosts.run("hosta", [*LAUNCH, *words], timeout=timeout, cwd=ROOT,
                     **kwargs)  # type: ignore[arg-type]


def start(hosts: VirtualHosts, *words: str, ranks: int = 3) -> subprocess.Popen[str]:
    """A launcher whose ranks have said that they are up."""
    process = hosts.start("hosta", [*LAUNCH, *words], cwd=ROOT)
    assert process.stdout is not None
    seen: list[str] = []
    while sum(line.endswith("up\n") for line in seen) < ranks:
        line = process.stdout.readline()
        assert line, f"the launcher ended: {seen}"
        seen.append(line)
    return process


def shell(text: str, mark: str, *words: str) -> list[str]:
    return ["--", "bash", "-c", text, mark, *words]


def test_every_rank_knows_its_place(quiet_hosts: VirtualHosts, mark: str) -> None:
    done = launch(quiet_hosts, "-H", "hosta:2,hostb:1,hostc:2", "-np", "4", "-v", *shell(
        'echo "$(hostname) $HOROVOD_RANK $HOROVOD_SIZE $HOROVOD_LOCAL_RANK $HOROVOD_LOCAL_SIZE '
        '$HOROVOD_CROSS_RANK $HOROVOD_CROSS_SIZE $HOROVOD_HOSTNAME $HOROVOD_GLOO_IFACE $PWD"',
        mark))
    assert done.returncode == 0, done.stdout
    found = sorted(re.findall(r"^\[\d\] (host.*)$", done.stdout, flags=re.MULTILINE))
    assert found == [
        f"hosta 0 4 0 2 0 3 hosta eth0 {ROOT}", f"hosta 1 4 1 2 0 1 hosta eth0 {ROOT}",
        f"hostb 2 4 0 1 1 3 hostb eth0 {ROOT}", f"hostc 3 4 0 1 2 3 hostc eth0 {ROOT}"]


def test_every_rank_reaches_the_rendezvous_and_the_others(quiet_hosts: VirtualHosts, mark: str
                                                          ) -> None:
    program = ("import os; from hvdtrain.world import detect_world; "
               "from hvdtrain.rendezvous.barrier import rendezvous_barrier; "
               "rendezvous_barrier(detect_world(os.environ), os.environ, timeout_s=20); "
               "print('met')")
    done = launch(quiet_hosts, "-H", ALL, "-v", "--", sys.executable, "-c", program, mark)
    assert (done.returncode, done.stdout.count("met\n")) == (0, 3), done.stdout


def test_a_low_limit_of_open_files_is_raised_for_the_launcher_alone(
        quiet_hosts: VirtualHosts, mark: str) -> None:
    done = quiet_hosts.run("hosta", [
        "bash", "-c", 'ulimit -Sn 40; exec "$@"', mark, *LAUNCH, "-H", "hosta:1,hostb:1",
        *shell('echo "$(hostname) $(ulimit -Sn)" >&2', mark)], cwd=ROOT)
    found = dict(re.findall(r"^\[\d\] (host.) (\d+)$", done.stdout, flags=re.MULTILINE))
    assert (done.returncode, found["hosta"]) == (0, "40"), done.stdout
    assert int(found["hostb"]) > 40  # its own login's


def test_hosts_from_a_hostfile(quiet_hosts: VirtualHosts, mark: str, tmp_path: Path) -> None:
    hostfile = tmp_path / "my hosts"
    hostfile.write_text("# three\nhosta slots=1\nhostb:1\n\nhostc\n", encoding="utf-8")
    done = launch(quiet_hosts, "--hostfile", str(hostfile), *shell("hostname >&2", mark))
    assert sorted(re.findall(r"^\[\d\] (\w+)$", done.stdout, flags=re.MULTILINE)) == [
        "hosta", "hostb", "hostc"]


def test_what_the_user_types_arrives_unchanged(quiet_hosts: VirtualHosts, mark: str,
                                               tmp_path: Path) -> None:
    """Blanks, quotes, semicolons, line ends and patterns; in words, values, names and paths."""
    folder = tmp_path / "a folder; touch $HOME `id` '\""
    folder.mkdir()
    words = ["two words", "semi;colon", "$(id)", "`id`", "a'b\"c", "*", "", "back\\slash",
             "line\nend", "--flag=x y", "ümläut"]
    program = tmp_path / "show me.py"
    program.write_text("import json, os, sys\nprint(json.dumps([os.getcwd(), sys.argv[2:], "
                       "os.environ['A VALUE'], os.environ['B.C-D']]), file=sys.stderr)\n",
                       encoding="utf-8")
    done = quiet_hosts.run("hosta", [
        *LAUNCH, "-H", ALL, "-x", "A VALUE=x; echo 'no' \"no\" $(no)\nno", "-x", "B.C-D=1", "--",
        sys.executable, str(program), mark, *words], cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"})
    assert done.returncode == 0, done.stdout
    found = [json.loads(line[4:]) for line in done.stdout.splitlines()]
    assert found == [[str(folder), words, "x; echo 'no' \"no\" $(no)\nno", "1"]] * 3


@pytest.mark.parametrize("name", ["-oProxyCommand=touch /tmp/x", "a;b", "a b", "$(id)", "a\nb"])
def test_odd_host_names_are_refused(hosts: VirtualHosts, name: str) -> None:
    done = launch(hosts, "-H", f"{name}:1", "--", "true")
    assert done.returncode == 2
    assert "Cannot read" in done.stdout


def test_secrets_stand_on_no_command_line(quiet_hosts: VirtualHosts, mark: str) -> None:
    process = start(quiet_hosts, "-H", ALL, "-x", "API_TOKEN=sesame-open", *shell(WAITING, mark))
    lines = [line for name in quiet_hosts.names for line in quiet_hosts.processes(name).values()
             if "API_TOKEN=sesame-open" not in line or "launch" not in line]
    quiet_hosts.signal("hosta", "hvdtrain launch", signal.SIGTERM)
    process.communicate(timeout=20)
    assert not [line for line in lines if "sesame-open" in line]


def test_hosts_that_cannot_be_reached_are_all_named_and_nothing_starts(
        quiet_hosts: VirtualHosts, mark: str, tmp_path: Path) -> None:
    done = launch(quiet_hosts, "-H", "hosta:1,hostx:1,hosty:1",
                  *shell(f"touch {shlex.quote(str(tmp_path))}/started", mark))
    assert done.returncode == 3
    assert "2 of the hosts cannot be used" in done.stdout
    assert "hostx: exit code 255, ssh: Could not resolve hostname hostx" in done.stdout
    assert "hosty: " in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_host_that_comes_late_is_waited_for(fragile_hosts: VirtualHosts, mark: str) -> None:
    port = "2222"
    process = fragile_hosts.start("hosta", [
        *LAUNCH, "-H", "hosta:1,hostb:1", "--ssh-port", port, "--start-timeout", "20",
        *shell("echo here >&2", mark)], cwd=ROOT)
    time.sleep(1.5)
    fragile_hosts.run("hostb", ["/usr/sbin/sshd", "-p", port])
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out.count("here")) == (0, 2), out


def test_who_is_waited_for_is_told_and_sigterm_is_heeded(quiet_hosts: VirtualHosts, mark: str
                                                         ) -> None:
    process = quiet_hosts.start("hosta", [
        *LAUNCH, "-H", "hosta:1,hostx:1", "--start-timeout", "60", *shell("true", mark)], cwd=ROOT)
    assert process.stdout is not None
    silent = threading.Timer(15.0, quiet_hosts.signal,
                             ("hosta", "hvdtrain launch", signal.SIGKILL))
    silent.start()
    line = process.stdout.readline()
    silent.cancel()
    silent.join()
    assert re.match(r"hvdtrain launch: waiting for hostx \(exit code 255, .*hostx.*\): \d+ s so",
                    line), line
    began = time.monotonic()
    quiet_hosts.signal("hosta", "hvdtrain launch", signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 143, out
    assert time.monotonic() - began < 3.0


def test_an_identity_file_is_used(fragile_hosts: VirtualHosts, mark: str, tmp_path: Path) -> None:
    key = tmp_path / "my key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    public = key.with_suffix(".pub").read_text()
    fragile_hosts.run("hostb", ["bash", "-c", f"echo {shlex.quote(public)} > "
                                              "/etc/ssh/authorized_keys"])
    words = ["-H", "hosta:1,hostb:1", *shell("echo here >&2", mark)]
    refused = launch(fragile_hosts, *words)
    assert refused.returncode == 3
    assert "Permission denied" in refused.stdout
    done = launch(fragile_hosts, "--ssh-identity-file", str(key), *words)
    assert (done.returncode, done.stdout.count("here")) == (0, 2), done.stdout


def test_interfaces_are_found_by_name_and_by_network(fragile_hosts: VirtualHosts, mark: str
                                                     ) -> None:
    fragile_hosts.interface("hosta", "ib0", "10.99.1.1/16")
    fragile_hosts.interface("hostb", "mlx5", "10.99.1.2/16")
    text = 'echo "$HOROVOD_GLOO_IFACE $NCCL_SOCKET_IFNAME" >&2'
    for wanted, expected in (("10.99.0.0/16", {"ib0 ib0", "mlx5 mlx5"}),
                             ("ib0,eth0", {"ib0 ib0", "eth0 eth0"})):
        done = launch(fragile_hosts, "-H", "hosta,hostb", "--network-interface", wanted,
                      *shell(text, mark))
        assert set(re.findall(r"^\[\d\] (.*)$", done.stdout, flags=re.MULTILINE)) == expected
    done = launch(fragile_hosts, "-H", "hosta,hostb", "--network-interface", "ib0",
                  *shell(text, mark))
    assert done.returncode == 2
    assert "hostb has no network interface ib0. It has: lo (127.0.0.1), eth0" in done.stdout


def test_a_login_script_that_prints_does_no_harm(fragile_hosts: VirtualHosts, mark: str) -> None:
    fragile_hosts.run("hostb", ["bash", "-c",
                                "echo 'ForceCommand echo Welcome to hostb; eval "
                                "\"$SSH_ORIGINAL_COMMAND\"' >> /etc/ssh/sshd_config"])
    fragile_hosts.run("hostb", ["/usr/sbin/sshd", "-p", "2222"])
    done = launch(fragile_hosts, "-H", "hosta:1,hostb:1", "--ssh-port", "2222",
                  *shell("echo here >&2", mark))
    assert (done.returncode, done.stdout.count("here")) == (0, 2), done.stdout


@pytest.mark.parametrize(("fault", "code", "words"), [
    ("echo bad >&2; exit 7", 7, "exit code 7"), ("kill -9 $$", 137, "SIGKILL"),
    ("kill -11 $$", 139, "SIGSEGV"), ("no-such-program", 127, "exit code 127")])
def test_a_rank_that_breaks_on_another_host_is_named(quiet_hosts: VirtualHosts, mark: str,
                                                     fault: str, code: int, words: str) -> None:
    process = start(quiet_hosts, "-H", ALL, *shell(
        f"echo up >&2; if [ $HOROVOD_RANK = 2 ]; then sleep 0.3; {fault}; exit; fi; "
        "exec sleep 60", mark))
    began = time.monotonic()
    out, _ = process.communicate(timeout=20)
    assert process.returncode == code
    assert re.search(rf"rank 2 on hostc failed .*{words}", out)
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_reaches_every_host(quiet_hosts: VirtualHosts, mark: str,
                                                     number: signal.Signals) -> None:
    process = start(quiet_hosts, "-H", ALL, *shell("echo up >&2; exec sleep 60", mark))
    quiet_hosts.signal("hosta", "hvdtrain launch", number)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + number, out


def test_nothing_outlives_a_launcher_that_is_killed(quiet_hosts: VirtualHosts, mark: str) -> None:
    process = start(quiet_hosts, "-H", ALL, *shell("echo up >&2; exec sleep 60", mark))
    quiet_hosts.signal("hosta", "hvdtrain launch", signal.SIGKILL)
    process.communicate(timeout=20)
    assert_gone(quiet_hosts, mark, within_s=2.0)


def test_ranks_that_ignore_sigterm_are_killed_on_every_host(quiet_hosts: VirtualHosts, mark: str
                                                            ) -> None:
    text = "trap '' TERM; echo up >&2; while :; do sleep 0.1; done"
    process = start(quiet_hosts, "-H", ALL, "--grace", "0.5", *shell(text, mark))
    quiet_hosts.signal("hosta", "hvdtrain launch", signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 143, out


def test_a_stopped_launcher_stops_its_ranks_and_goes_on(quiet_hosts: VirtualHosts, mark: str
                                                        ) -> None:
    """Ctrl-Z, longer than the lease of the agents would allow."""
    text = "echo up >&2; for i in $(seq 40); do sleep 0.05; done; echo done >&2"
    process = start(quiet_hosts, "-H", ALL, *shell(text, mark))
    quiet_hosts.signal("hosta", "hvdtrain launch", signal.SIGTSTP)
    time.sleep(1.0)
    states = {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
              for name in quiet_hosts.names for pid in quiet_hosts.processes(name, "seq 40")
              if "launch" not in quiet_hosts.processes(name, "seq 40").get(pid, "launch")}
    assert states == {"T"}
    time.sleep(13.0)
    quiet_hosts.signal("hosta", "hvdtrain launch", signal.SIGCONT)
    process.send_signal(signal.SIGCONT)  # nsenter stops with what it has started
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out.count("done\n")) == (0, 3), out


def test_a_host_that_dies_is_named(fragile_hosts: VirtualHosts, mark: str) -> None:
    process = start(fragile_hosts, "-H", ALL, *shell("echo up >&2; exec sleep 60", mark))
    began = time.monotonic()
    fragile_hosts.crash("hostb")
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 255, out
    assert re.search(r"rank 1 on hostb failed .*the connection to hostb was lost", out)
    assert time.monotonic() - began < 5.0
    assert not fragile_hosts.processes("hosta", mark)
    assert not fragile_hosts.processes("hostc", mark)


def test_a_host_whose_cable_is_cut_is_named_and_ends_its_ranks(fragile_hosts: VirtualHosts,
                                                               mark: str) -> None:
    """The rank writes all the time, so that its agent is stuck in a dead connection."""
    text = ("trap '' TERM; echo up >&2; [ $HOROVOD_RANK = 1 ] && while :; do echo "
            f"{'x' * 1000}; done; exec sleep 60")
    process = start(fragile_hosts, "-H", ALL, *shell(text, mark))
    fragile_hosts.cut("hostb")
    began = time.monotonic()
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 255
    assert re.search(r"rank 1 on hostb failed .*the connection to hostb was lost", out)
    assert time.monotonic() - began < 20.0
    assert_gone(fragile_hosts, mark, within_s=20.0 - (time.monotonic() - began))


def test_a_folder_that_is_missing_there_is_named(fragile_hosts: VirtualHosts, mark: str,
                                                 tmp_path: Path) -> None:
    fragile_hosts.run("hostb", ["mount", "-t", "tmpfs", "tmpfs", str(tmp_path.parent)])
    done = fragile_hosts.run("hosta", [*LAUNCH, "-H", "hosta:1,hostb:1",
                                       *shell("sleep 5", mark)], cwd=tmp_path,
                             env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 127
    assert re.search(r"rank 1 on hostb failed .*cannot be started: .*"
                     + re.escape(str(tmp_path)), done.stdout)


def test_the_launcher_may_stand_outside_of_its_hosts(quiet_hosts: VirtualHosts, mark: str) -> None:
    done = launch(quiet_hosts, "-H", "hostb:1,hostc:1",
                  *shell('echo "$(hostname) ${HOROVOD_GLOO_RENDEZVOUS_ADDR%%:*}" >&2', mark))
    assert sorted(re.findall(r"^\[\d\] (.*)$", done.stdout, flags=re.MULTILINE)) == [
        f"hostb {quiet_hosts.address('hosta')}", f"hostc {quiet_hosts.address('hosta')}"]


def test_logs_of_all_hosts_are_written_here(quiet_hosts: VirtualHosts, mark: str, tmp_path: Path
                                            ) -> None:
    done = launch(quiet_hosts, "-H", ALL, "--output", str(tmp_path / "my logs"),
                  *shell("hostname", mark))
    assert done.returncode == 0
    assert [path.read_text()[9:] for path in sorted((tmp_path / "my logs").iterdir())] == [
        "stdout hosta\n", "stdout hostb\n", "stdout hostc\n"]


def test_much_output_of_another_host_arrives_whole(quiet_hosts: VirtualHosts, mark: str) -> None:
    done = launch(quiet_hosts, "-H", "hostb:1", "--", sys.executable, "-c",
                  "for i in range(20000): print(i, 'x' * 50)", mark)
    lines = done.stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(20000))


@pytest.mark.parametrize(("configured", "code"), [
    ("yes", 3), ("ask", 0), ("accept-new", 0), ("no", 0)])
def test_what_ssh_is_told_of_unknown_keys_is_obeyed(fragile_hosts: VirtualHosts, mark: str,
                                                    configured: str, code: int) -> None:
    fragile_hosts.run("hosta", ["bash", "-c", f"echo '  StrictHostKeyChecking {configured}' >> "
                                "/etc/ssh/ssh_config"])
    done = launch(fragile_hosts, "-H", "hosta:1,hostb:1", *shell("true", mark))
    assert done.returncode == code, done.stdout
    assert ("Host key verification failed" in done.stdout) == (code != 0)
    line = launch(fragile_hosts, "-H", "hosta:1,hostb:1", "--starter", "mpirun", "--dry-run",
                  *shell("true", mark))
    assert ("accept-new" in line.stdout) == (configured == "ask"), line.stdout


def test_the_launcher_itself_leaves_nothing_in_tmp(quiet_hosts: VirtualHosts, mark: str) -> None:
    before = set(os.listdir("/tmp"))
    launch(quiet_hosts, "-H", ALL, *shell("true", mark))
    assert not {name for name in set(os.listdir("/tmp")) - before if name.startswith("hvdtrain")}


def test_each_host_forks_its_ranks_from_a_process_of_its_own(quiet_hosts: VirtualHosts, mark: str
                                                             ) -> None:
    program = ("import os, socket, sys; parent = os.getppid(); "
               "words = open(f'/proc/{parent}/cmdline').read(); "
               "print(socket.gethostname(), parent, 'preload.server' in words, "
               "'tensorflow' in sys.modules, file=sys.stderr)")
    done = launch(quiet_hosts, "-H", "hosta:2,hostb:1", "--preload", "--", sys.executable, "-c",
                  program, mark, timeout=60.0)
    assert done.returncode == 0, done.stdout
    found = [line.split() for line in re.findall(r"^\[\d\] (.*)$", done.stdout, re.MULTILINE)]
    assert sorted((host, *rest) for host, _, *rest in found) == [
        ("hosta", "True", "True"), ("hosta", "True", "True"), ("hostb", "True", "True")]
    assert len({(host, parent) for host, parent, *_ in found}) == 2
    assert "as new processes" not in done.stdout
    assert_gone(quiet_hosts, "preload.server")
