"""The doctor on this machine, and its conversation with hosts that misbehave in every way.

The hosts are reached through programs named `ssh` that stand first on PATH; behind them is this
machine.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import packaging
import psutil
import pytest

from hvdtrain.doctor.probe_client import HostSilentError, ProbeClient, start_program
from hvdtrain.errors import EXIT_TIME_OVER
from hvdtrain.launch.options import RemoteOptions
from hvdtrain.process import run_program

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = (sys.executable, "-m", "hvdtrain", "doctor")
RUN_HERE = 'eval "${@: -1}"'  # ssh's last argument is the command


def doctor(*words: str, cwd: Path, env: dict[str, str] | None = None
           ) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DOCTOR, *words], cwd=cwd, env=os.environ | (env or {}), text=True,
                          capture_output=True, timeout=240, check=False)


def checks(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    return {finding["check"]: finding for finding in json.loads(done.stdout)["checks"]}


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts an `ssh` with this text first on PATH; gives the PATH."""
    def make(text: str) -> str:
        program = tmp_path / "bin" / "ssh"
        program.parent.mkdir(exist_ok=True)
        # `ssh -G` tells the configuration and connects to nobody.
        program.write_text(f"#!/bin/bash\n[ \"$1\" = -G ] && exit 1\n{text}\n")
        program.chmod(0o755)
        path = f"{program.parent}:{os.environ['PATH']}"
        monkeypatch.setenv("PATH", path)
        return path
    return make


def is_alive(pid: int) -> bool:
    """Whether it still runs; its end may take a moment to be seen."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state == "Z":
            return False
        time.sleep(0.02)
    return True


def opened(host: str = "hostb") -> ProbeClient:
    client = ProbeClient(host, RemoteOptions(), {"PYTHONPATH": str(ROOT)})
    client.start()
    return client


def test_this_machine_is_well(tmp_path: Path) -> None:
    done = doctor("--json", "--no-allreduce", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    found = checks(done)
    assert found["python"]["found"].endswith(sys.executable)
    assert found["horovod-loads"]["status"] == "ok"
    assert found["hvdtrain"]["found"].startswith("0.1.0, ")
    assert list(tmp_path.iterdir()) == []  # the file that was written to see who sees it
    assert "allreduce" not in found


@pytest.mark.slow
def test_two_ranks_reduce_and_are_measured(tmp_path: Path) -> None:
    done = doctor(cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " MB/s bus bandwidth: 16 MiB float32 in " in done.stdout
    assert "with horovod-gloo, CPU" in done.stdout
    assert "0 failed" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_doctor_that_is_told_to_stop_ends_its_ranks(tmp_path: Path, number: int) -> None:
    # Python runs this file before the program: the ranks wait instead of importing TensorFlow.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib\nif 'HOROVOD_RANK' in os.environ:\n"
        f"    pathlib.Path({str(tmp_path)!r}, f'rank{{os.getpid()}}').touch()\n"
        "    os.execvp('sleep', ['sleep', '600'])\n")
    process = subprocess.Popen(DOCTOR, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE,
                               env=os.environ | {"PYTHONPATH": str(tmp_path)})
    deadline = time.monotonic() + 60
    while len(ranks := list(tmp_path.glob("rank*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (128 + number, "")
    assert [rank.name for rank in ranks if is_alive(int(rank.name[4:]))] == []


@pytest.mark.slow
def test_sums_that_are_wrong_are_found() -> None:
    # A collective of one, where two were promised: its sum is its own summand.
    program = """
from types import SimpleNamespace
from hvdtrain.collectives.single import SingleCollective
from hvdtrain.doctor.allreduce_probe import reduce_and_measure
world = SimpleNamespace(rank=0, size=2)
reduce_and_measure(SimpleNamespace(collective=SingleCollective(), world=world))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 1
    assert "sums are wrong; number 1 is 1.0, but must be 3.0" in done.stderr


def test_a_rank_that_dies_is_shown(tmp_path: Path) -> None:
    # Python runs this file before the program: only the second of the two ranks breaks.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif os.environ.get('HOROVOD_RANK') == '1':\n"
        "    sys.stderr.write('out of luck\\n')\n    sys.stderr.flush()\n    os._exit(9)\n")
    done = doctor("--json", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    found = checks(done)["allreduce"]
    assert (done.returncode, found["status"]) == (3, "failed")
    assert found["found"].startswith("exit code 9: ")
    assert "out of luck" in found["found"]
    assert found["fix"].startswith("hvdtrain launch -np 2 -H localhost:2 --starter native -v -- ")


def test_a_broken_setting_has_exit_code_3_and_a_repair(tmp_path: Path) -> None:
    done = doctor("--json", cwd=tmp_path, env={"KERAS_BACKEND": "jax"})
    found = checks(done)
    assert done.returncode == 3
    assert json.loads(done.stdout)["status"] == "failed"
    assert found["keras-backend"]["fix"] == "export KERAS_BACKEND=tensorflow"
    assert found["allreduce"]["found"].startswith("not run, because keras-backend failed on ")


def test_a_python_without_tensorflow(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    needed = tmp_path / "needed"
    needed.mkdir()
    for package in (packaging, psutil):
        (needed / package.__name__).symlink_to(Path(package.__file__).parent)
    program = """
import json, os
from dataclasses import asdict
from hvdtrain.doctor.examine import examine
from hvdtrain.doctor.options import DoctorOptions
findings = examine(DoctorOptions(), os.environ, lambda text: None).findings
print(json.dumps({"checks": [asdict(finding) for finding in findings]}))
"""
    done = subprocess.run(
        [tmp_path / "bare/bin/python", "-c", program], text=True, cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": f"{ROOT}:{needed}"},
        capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    found = checks(done)
    assert found["python"]["found"].endswith(str(tmp_path / "bare/bin/python"))
    assert (found["tensorflow"]["status"], found["tensorflow"]["found"]) == (
        "failed", "not installed")
    assert "Horovod is not installed" in found["horovod"]["found"]
    assert found["allreduce"]["found"].startswith("not run, because tensorflow failed on ")


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559, 550.54.15'\n")
    smi.chmod(0o755)
    env = {"PATH": f"{smi.parent}:{os.environ['PATH']}"}
    found = checks(doctor("--json", "--no-allreduce", cwd=tmp_path, env=env))["gpus"]
    assert found["status"] == "warning"
    assert "1 x NVIDIA H100 80GB HBM3 81559 MiB, driver 550.54.15" in found["found"]


def test_what_nvidia_smi_complains_of_is_told(tmp_path: Path) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\n"
                   "exit 18\n")
    smi.chmod(0o755)
    env = {"PATH": f"{smi.parent}:{os.environ['PATH']}"}
    found = checks(doctor("--json", "--no-allreduce", cwd=tmp_path, env=env))["gpus"]
    assert found["status"] == "warning"
    assert "Driver/library version mismatch" in found["found"]
    assert "modprobe" in found["fix"]


def test_a_program_that_hangs_is_killed_with_its_children_at_its_limit(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    text = f"trap '' TERM; sleep 600 & echo $$ $! > {pids}; wait; sleep 600"
    began = time.monotonic()
    said = run_program(["bash", "-c", text], limit_s=0.5)
    assert time.monotonic() - began < 5
    assert (said.code, said.last_line) == (EXIT_TIME_OVER, "no answer in 0.5 s")
    assert [pid for pid in pids.read_text().split() if is_alive(int(pid))] == []


def test_a_host_is_asked_through_ssh(fake_ssh, tmp_path: Path) -> None:
    fake_ssh(RUN_HERE)
    client = opened()
    assert abs(client.ask("clock", limit_s=20) - time.time()) < 5
    (tmp_path / "file").write_text("word")
    assert client.ask("file", limit_s=20, file=str(tmp_path / "file"), token="word") is True
    client.close()
    assert client.noise == []


def test_the_ports_of_two_hosts(fake_ssh, tmp_path: Path) -> None:
    fake_ssh(RUN_HERE)
    clients = [opened("a"), opened("b")]
    ports = [client.ask("facts", limit_s=60, token="word", peers=[],
                         directory=str(tmp_path))["network"]["port"] for client in clients]
    target = {"host": "b", "address": "127.0.0.1", "port": ports[1]}
    closed = target | {"host": "closed", "port": 1}
    assert clients[0].ask("connect", limit_s=20, token="word", targets=[target, closed]) == {
        "b": "", "closed": "127.0.0.1: Connection refused"}
    assert clients[0].ask("connect", limit_s=20, token="other", targets=[target]) == {
        "b": "127.0.0.1 is answered by another"}
    for client in clients:
        client.close()


def test_what_login_scripts_print_is_no_answer(fake_ssh) -> None:
    fake_ssh(f"echo Welcome to hostb; echo -n 'Quota: '; {RUN_HERE}")
    client = opened()
    assert client.ask("clock", limit_s=20) > 0
    client.close()
    assert client.noise == ["Welcome to hostb", "Quota:"]


@pytest.mark.parametrize(("text", "code", "words"), [
    ("echo 'root@b: Permission denied (publickey).' >&2; exit 255", 255, "Permission denied"),
    ("echo 'bash: /x/python: No such file' >&2; exit 127", 127, "No such file"),
    ("exit 255", 255, "it ended with code 255 and said nothing"),
    ("kill -9 $$", -9, "it ended with code -9"),
])
def test_why_a_host_does_not_answer_is_kept(fake_ssh, text: str, code: int, words: str) -> None:
    fake_ssh(text)
    with pytest.raises(HostSilentError) as caught:
        opened().ask("clock", limit_s=20)
    assert caught.value.code == code
    assert words in caught.value.words


@pytest.mark.parametrize("text", [
    "exec sleep 600", "trap '' TERM; echo hanging >&2; while :; do sleep 1; done",
    "exec 1>&-; exec sleep 600",  # it closes its output and stays
    "yes",  # it never stops talking
])
def test_a_host_that_hangs_does_not_hang_the_doctor(fake_ssh, text: str) -> None:
    fake_ssh(text)
    client = opened()
    began = time.monotonic()
    with pytest.raises(HostSilentError):
        client.ask("clock", limit_s=1)
    client.close()
    assert time.monotonic() - began < 8
    with pytest.raises(HostSilentError, match="an earlier question"):
        client.ask("clock", limit_s=1)


def test_without_ssh_the_repair_is_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                 ) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostSilentError, match="ssh cannot be started"):
        opened()


def test_an_old_python_says_so() -> None:
    # No older interpreter is here, so this one is made to ask for a newer.
    newer = start_program({}, oldest=(99, 0))
    done = subprocess.run([sys.executable, "-I", "-S", "-c", newer], capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, check=False)
    assert (done.returncode, done.stderr) == (
        1, f"Python {'.'.join(map(str, sys.version_info[:3]))} is too old\n")


def test_a_host_without_hvdtrain_says_so(fake_ssh, tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ssh(RUN_HERE)
    # Found before the one that is installed, also by the finder of an editable installation.
    (tmp_path / "hvdtrain").mkdir()
    (tmp_path / "hvdtrain" / "__init__.py").touch()
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path = [one for one in sys.meta_path if 'Editable' not in str(one)]")
    monkeypatch.chdir(tmp_path)
    client = ProbeClient("hostb", RemoteOptions(), {"PYTHONPATH": str(tmp_path)})
    client.start()
    with pytest.raises(HostSilentError, match="No module named 'hvdtrain.doctor'") as caught:
        client.ask("clock", limit_s=20)
    assert caught.value.code == 1


def test_a_probe_whose_doctor_was_killed_ends(fake_ssh) -> None:
    fake_ssh(RUN_HERE)
    client = opened()
    client.ask("clock", limit_s=20)
    process = client._process
    assert process is not None
    process.stdin.close()
    assert process.wait(timeout=10) == 0
    client.close()


@pytest.mark.parametrize(("number", "code"), [
    (signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_doctor_that_is_ended_leaves_nothing(fake_ssh, tmp_path: Path, number: int, code: int
                                               ) -> None:
    # As ssh, it ends with its input; but there is no answer from the hosts.
    pids = tmp_path / "pids"
    fake_ssh(f"echo $$ >> {pids}; exec cat > /dev/null")
    process = subprocess.Popen([*DOCTOR, "-H", "hostb,hostc"], cwd=tmp_path, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert "asking hostb, hostc" in process.stderr.readline()
    while not pids.exists() or len(pids.read_text().split()) < 2:
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=10)
    assert process.returncode == code
    assert [pid for pid in pids.read_text().split() if is_alive(int(pid))] == []


def test_ctrl_c_ends_hosts_that_do_not_listen(fake_ssh, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    fake_ssh(f"echo $$ >> {pids}; exec sleep 600")
    process = subprocess.Popen([*DOCTOR, "-H", "hostb,hostc"], cwd=tmp_path, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not pids.exists() or len(pids.read_text().split()) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    assert [pid for pid in pids.read_text().split() if is_alive(int(pid))] == []
