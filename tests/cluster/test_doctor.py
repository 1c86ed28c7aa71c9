"""`hvdtrain doctor -H ...` on real ssh hosts: healthy, and with one fault, which is named.

The allreduce is left out but for two tests: it imports TensorFlow.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import VirtualHosts
from tests.cluster.slurm import PrivateSlurm

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = (sys.executable, "-m", "hvdtrain", "doctor")
ALL = "hosta:1,hostb:1,hostc:1"
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(which, now);
    if (which == CLOCK_REALTIME) now->tv_sec += SHIFT;
    return code;
}
"""


class Report:
    """What the doctor said."""

    def __init__(self, done: subprocess.CompletedProcess[str], seconds: float) -> None:
        self.code, self.seconds, self.text = done.returncode, seconds, done.stdout
        self.checks: list[dict[str, Any]] = json.loads(done.stdout)["checks"]

    def of(self, check: str) -> dict[str, str]:
        """The statuses of a check by host."""
        return {one["host"]: one["status"] for one in self.checks if one["check"] == check}

    def bad(self) -> list[tuple[str, str, str]]:
        """Check, host and status of all that is not well; each with its repair."""
        bad = [one for one in self.checks if one["status"] in ("warning", "failed")]
        assert all(one["fix"] and one["expected"] for one in bad)
        return [(one["check"], one["host"], one["status"]) for one in bad]

    def one(self, check: str, host: str) -> dict[str, str]:
        return next(one for one in self.checks if (one["check"], one["host"]) == (check, host))


def doctor(hosts: VirtualHosts, *words: str, on: str = "hosta", cwd: Path = ROOT,
           allreduce: bool = False, timeout: float = 90.0) -> Report:
    began = time.monotonic()
    done = hosts.run(on, [*DOCTOR, "--json", *words, *([] if allreduce else ["--no-allreduce"])],
                     cwd=cwd, timeout=timeout, merge=False)
    assert done.stdout.startswith("{"), done.stderr
    return Report(done, time.monotonic() - began)


@pytest.fixture
def second_sshd(fragile_hosts: VirtualHosts) -> Any:
    """Starts one more sshd on hostb, on port 2222, with other settings."""
    def start(*settings: str) -> VirtualHosts:
        options = [word for setting in settings for word in ("-o", setting)]
        done = fragile_hosts.run("hostb", ["/usr/sbin/sshd", "-p", "2222", *options])
        assert done.returncode == 0, done.stdout
        return fragile_hosts
    return start


def cover(hosts: VirtualHosts, name: str, place: Path, copy: Path) -> None:
    """Let a host see `copy` where the others see `place`."""
    done = hosts.run(name, ["mount", "--bind", str(copy), str(place)])
    assert done.returncode == 0, done.stdout


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "train.py").write_text("first\n")
    return folder


@pytest.mark.slow
def test_healthy_hosts_with_an_allreduce_over_the_network(hosts: VirtualHosts, job: Path) -> None:
    report = doctor(hosts, "-H", ALL, cwd=job, allreduce=True, timeout=240)
    assert (report.code, report.bad()) == (0, []), report.text
    assert report.of("ssh") == {"hostb": "ok", "hostc": "ok"}
    assert report.of("horovod-loads") == {"hosta": "ok", "hostb": "ok", "hostc": "ok"}
    assert "6 connections between 3 hosts" in report.one("ports", "all")["found"]
    assert f"{job} is shared by 3 hosts" in report.one("directory", "all")["found"]
    assert "ranks use eth0" in report.one("interface", "hostc")["found"]
    found = report.one("allreduce", "hosta,hostb")["found"]
    assert " MB/s bus bandwidth" in found
    assert "horovod-gloo" in found
    assert [file.name for file in job.iterdir()] == ["train.py"]
    for name in hosts.names:
        assert not hosts.processes(name, "hvdtrain.doctor.probe")


@pytest.mark.slow
def test_the_bandwidth_is_that_of_the_network(fragile_hosts: VirtualHosts, job: Path) -> None:
    fragile_hosts.rate("400mbit")  # 50 MB/s, of which Gloo reaches nine tenths
    report = doctor(fragile_hosts, "-H", "hosta:1,hostb:1", cwd=job, allreduce=True, timeout=240)
    found = report.one("allreduce", "hosta,hostb")["found"]
    assert 35 <= int(found.split(" MB/s")[0]) <= 50, found


def test_a_launcher_that_takes_no_ranks(hosts: VirtualHosts, job: Path) -> None:
    report = doctor(hosts, "-H", "hostb:1,hostc:1", cwd=job)
    assert (report.code, report.bad()) == (0, []), report.text
    assert set(report.of("tensorflow")) == {"hostb", "hostc"}
    # Each to the other, and both to the rendezvous at hosta.
    assert "4 connections between 2 hosts" in report.one("ports", "all")["found"]


def test_a_host_whose_cable_is_cut(fragile_hosts: VirtualHosts) -> None:
    fragile_hosts.cut("hostc")
    report = doctor(fragile_hosts, "-H", ALL)
    assert report.code == 3
    assert report.bad() == [("ssh", "hostc", "failed")]
    assert report.of("horovod-loads") == {"hosta": "ok", "hostb": "ok"}
    words = report.one("ssh", "hostc")["found"]
    assert "timed out" in words or "No route to host" in words
    assert report.seconds < 30


def test_an_sshd_that_does_not_answer_and_one_that_hangs_after_the_login(second_sshd: Any) -> None:
    """Two doctors at the same time, since both only wait."""
    hosts = second_sshd("ForceCommand=sleep 600")
    hosts.signal("hostc", "sshd", signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        silent = pool.submit(doctor, hosts, "-H", "hosta:1,hostc:1")
        hangs = pool.submit(doctor, hosts, "-H", "hosta:1,hostb:1", "--ssh-port", "2222")
        report = silent.result()
        assert report.bad() == [("ssh", "hostc", "failed")]
        assert report.seconds < 45
        report = hangs.result()
    assert report.bad() == [("ssh", "hostb", "failed")]
    assert report.seconds < 60
    assert report.one("ssh", "hostb")["fix"].startswith("ssh -v -p 2222 ")


def test_a_key_that_is_not_known(second_sshd: Any) -> None:
    hosts = second_sshd("AuthorizedKeysFile=/dev/null")
    report = doctor(hosts, "-H", "hosta:1,hostb:1", "--ssh-port", "2222")
    assert report.bad() == [("ssh", "hostb", "failed")]
    assert "Permission denied" in report.one("ssh", "hostb")["found"]
    assert report.one("ssh", "hostb")["fix"] == "ssh-copy-id -p 2222 hostb"


def test_names_that_nobody_knows_and_ports_on_which_nobody_listens(hosts: VirtualHosts) -> None:
    report = doctor(hosts, "-H", "hosta:1,nohost:1")
    assert report.bad() == [("ssh", "nohost", "failed")]
    assert "Could not resolve hostname" in report.one("ssh", "nohost")["found"]
    report = doctor(hosts, "-H", "hosta:1,hostb:1", "--ssh-port", "2999")
    assert "Connection refused" in report.one("ssh", "hostb")["found"]


def test_a_login_script_that_prints(second_sshd: Any) -> None:
    hosts = second_sshd('ForceCommand=echo Welcome to hostb; eval "$SSH_ORIGINAL_COMMAND"')
    report = doctor(hosts, "-H", "hosta:1,hostb:1", "--ssh-port", "2222")
    assert (report.code, report.bad()) == (0, [("login-output", "hostb", "warning")])
    assert "Welcome to hostb" in report.one("login-output", "hostb")["found"]


def test_hosts_that_cannot_reach_each_other(fragile_hosts: VirtualHosts) -> None:
    # hostb answers to nothing of hostc: hostc waits, as behind a firewall that drops.
    fragile_hosts.run("hostb", ["ip", "route", "add", "blackhole",
                                fragile_hosts.address("hostc")])
    report = doctor(fragile_hosts, "-H", ALL)
    assert (report.code, report.bad()) == (3, [("ports", "hostb", "failed"),
                                               ("ports", "hostc", "failed")])
    waits = report.one("ports", "hostc")
    assert waits["found"] == "cannot connect to hostb: no answer from 10.77.0.2 in 5 s"
    assert waits["fix"].startswith("iptables -I INPUT -p tcp -s 10.77.0.3 -j ACCEPT   (on hostb")
    assert "cannot connect to hostc" in report.one("ports", "hostb")["found"]
    assert report.seconds < 30


def test_an_interface_that_one_host_lacks(fragile_hosts: VirtualHosts) -> None:
    for name, address in (("hosta", "10.88.0.1/24"), ("hostb", "10.88.0.2/24")):
        fragile_hosts.interface(name, "fast0", address)
    report = doctor(fragile_hosts, "-H", ALL, "--network-interface", "fast0")
    assert ("interface", "hostc", "failed") in report.bad()
    assert "fast0" in report.one("interface", "hostc")["found"]
    # The two that have it are not connected by it, and that is told as well.
    assert ("ports", "hosta", "failed") in report.bad()


def test_other_code_on_one_host(fragile_hosts: VirtualHosts, tmp_path: Path) -> None:
    copy = tmp_path / "hvdtrain"
    shutil.copytree(ROOT / "hvdtrain", copy)
    (copy / "log.py").write_text((copy / "log.py").read_text() + "# edited\n")
    cover(fragile_hosts, "hostb", ROOT / "hvdtrain", copy)
    report = doctor(fragile_hosts, "-H", ALL)
    assert (report.code, report.bad()) == (3, [("same-code", "hostb", "failed")])


def test_another_version_on_one_host(fragile_hosts: VirtualHosts, tmp_path: Path) -> None:
    import importlib.metadata
    metadata = Path(str(importlib.metadata.distribution("keras").locate_file("")))
    info = next(metadata.glob("keras-*.dist-info"))
    copy = tmp_path / info.name
    shutil.copytree(info, copy)
    text = (copy / "METADATA").read_text()
    version = importlib.metadata.version("keras")
    (copy / "METADATA").write_text(text.replace(f"Version: {version}", "Version: 3.7.0", 1))
    cover(fragile_hosts, "hostc", info, copy)
    report = doctor(fragile_hosts, "-H", ALL)
    assert (report.code, report.bad()) == (3, [("same-versions", "hostc", "failed")])
    assert report.one("same-versions", "hostc")["found"] == \
        f"keras 3.7.0; the others have {version}"


def test_no_hvdtrain_on_one_host(fragile_hosts: VirtualHosts, job: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    cover(fragile_hosts, "hostb", ROOT / "hvdtrain", nothing)
    report = doctor(fragile_hosts, "-H", ALL, cwd=job)
    assert report.bad() == [("hvdtrain", "hostb", "failed")]
    assert "No module named" in report.one("hvdtrain", "hostb")["found"]
    assert report.of("horovod-loads") == {"hosta": "ok", "hostc": "ok"}


def test_a_directory_that_is_not_shared(fragile_hosts: VirtualHosts, job: Path, tmp_path: Path
                                        ) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(job, copy)
    cover(fragile_hosts, "hostb", job, copy)
    report = doctor(fragile_hosts, "-H", ALL, cwd=job)
    assert (report.code, report.bad()) == (0, [("directory", "hostb", "warning")])
    assert report.of("job-files") == {"all": "ok"}
    (copy / "train.py").write_text("second\n")
    report = doctor(fragile_hosts, "-H", ALL, cwd=job)
    assert report.bad() == [("directory", "hostb", "warning"), ("job-files", "hostb", "warning")]


def test_an_output_folder_that_is_not_shared(fragile_hosts: VirtualHosts, job: Path, tmp_path: Path
                                             ) -> None:
    output, other = tmp_path / "output", tmp_path / "other"
    output.mkdir()
    other.mkdir()
    cover(fragile_hosts, "hostb", output, other)
    report = doctor(fragile_hosts, "-H", ALL, "--output", str(output / "run1"), cwd=job)
    assert report.bad() == [("output", "hostb", "warning")]
    assert (list(output.iterdir()), list(other.iterdir())) == ([], [])


@pytest.mark.parametrize(("shift_s", "code", "status"), [
    (-5, 0, "warning"), (3600, 3, "failed")])
def test_a_clock_that_differs(second_sshd: Any, tmp_path: Path, shift_s: int, code: int,
                              status: str) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("the other clock is made with a C compiler")
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", f"-DSHIFT={shift_s}", "-o", library, source,
                    "-ldl"], check=True)
    hosts = second_sshd(f"SetEnv=LD_PRELOAD={library}")
    report = doctor(hosts, "-H", "hosta:1,hostb:1", "--ssh-port", "2222")
    assert (report.code, report.bad()) == (code, [("clock", "hostb", status)])
    assert ("behind" if shift_s < 0 else "ahead") in report.one("clock", "hostb")["found"]


def test_more_ranks_than_cores(hosts: VirtualHosts) -> None:
    report = doctor(hosts, "-H", "hosta:1,hostb:100000")
    assert ("cores", "hostb", "warning") in report.bad()
    assert ("cores", "hosta", "warning") not in report.bad()


def test_slurm(slurm: PrivateSlurm, job: Path) -> None:
    command = [*DOCTOR, "--json", "--no-allreduce"]
    report = Report(slurm.run(["bash", "-c", f"{' '.join(command)} 2>/dev/null"], cwd=job), 0.0)
    found = report.one("slurm", "hosta")
    assert found["status"] == "ok", report.text
    assert "not inside of a job; srun --mpi has " in found["found"]
    assert "pmix" in found["found"]
    assert report.one("pmix", "hosta")["status"] == "ok"
    inside = slurm.run(["bash", "-c", f"srun -n 1 {' '.join(command)} 2>/dev/null"], cwd=job)
    assert ", in a step; " in next(one["found"] for one in Report(inside, 0.0).checks
                                   if one["check"] == "slurm")
