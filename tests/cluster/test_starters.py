"""Every starter on real hosts and in a real Slurm: each rank gets its place, and Horovod agrees."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import VirtualHosts
from tests.cluster.slurm import PrivateSlurm

ROOT = Path(__file__).resolve().parents[2]
RANK = (sys.executable, str(ROOT / "tests" / "cluster" / "light_rank.py"))
LAUNCH = (sys.executable, "-m", "hvdtrain", "launch", "-v")
ENV = {"PYTHONPATH": str(ROOT), "OMPI_ALLOW_RUN_AS_ROOT": "1",
       "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
PLACES = {0: ("hosta", [0, 3, 0, 2]), 1: ("hosta", [1, 3, 1, 2]), 2: ("hostb", [2, 3, 0, 1])}


def ranks(done: subprocess.CompletedProcess[str]) -> dict[int, dict[str, Any]]:
    """What the ranks printed, by rank."""
    assert done.returncode == 0, done.stdout
    found = [json.loads(text) for text in re.findall(r"\{\"place\".*?\}", done.stdout)]
    for rank in found:
        assert rank["place"] == rank["promised"], done.stdout
    return {rank["place"][0]: rank for rank in found}


def places(found: dict[int, dict[str, Any]]) -> dict[int, tuple[str, list[int]]]:
    return {rank: (said["host"], said["place"]) for rank, said in found.items()}


@pytest.mark.parametrize(("options", "starter", "mpi"), [
    (["--starter", "native"], "native", False),
    (["--starter", "mpirun"], "openmpi", True),
    (["--starter", "horovodrun", "--network-interface", "eth0"], "horovodrun", False),
    (["--starter", "horovodrun", "--collective", "horovod-mpi", "--network-interface", "eth0"],
     "openmpi", True),
])
def test_ranks_on_two_hosts(hosts: VirtualHosts, options: list[str], starter: str, mpi: bool
                            ) -> None:
    found = ranks(hosts.run("hosta", [*LAUNCH, "-H", "hosta:2,hostb:1", *options, "--",
                                      *RANK], cwd=ROOT, env=ENV, timeout=90))
    assert places(found) == PLACES
    assert {rank["cross"][0] for rank in found.values() if rank["host"] == "hostb"} == {1}
    assert {(rank["starter"], rank["mpi"]) for rank in found.values()} == {(starter, mpi)}


def test_horovodrun_as_typed_on_two_hosts(fragile_hosts: VirtualHosts) -> None:
    """Without `hvdtrain launch` before it: with MPI, whose ssh it gives a port."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    # As where the keys of the hosts are known; the virtual hosts know none.
    fragile_hosts.run("hosta", ["bash", "-c",
                                "echo '  StrictHostKeyChecking no' >> /etc/ssh/ssh_config"])
    found = ranks(fragile_hosts.run("hosta", [
        "horovodrun", "-np", "3", "-H", "hosta:2,hostb:1", "--network-interfaces", "eth0", "-p",
        "22", *RANK], cwd=ROOT, env=ENV | {"PATH": path}, timeout=90))
    assert places(found) == PLACES
    assert {(rank["starter"], rank["mpi"]) for rank in found.values()} == {("openmpi", True)}


@pytest.mark.parametrize(("configured", "accepted"), [("ask", True), ("yes", False)])
def test_horovodrun_obeys_what_ssh_is_told_of_unknown_keys(
        fragile_hosts: VirtualHosts, configured: str, accepted: bool) -> None:
    fragile_hosts.run("hosta", ["bash", "-c", f"echo '  StrictHostKeyChecking {configured}' >> "
                                "/etc/ssh/ssh_config"])
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = fragile_hosts.run("hosta", [
        "horovodrun", "--gloo", "--disable-cache", "-np", "2", "-H", "hosta:1,hostb:1",
        "--network-interfaces", "eth0", *RANK], cwd=ROOT, env=ENV | {"PATH": path}, timeout=90)
    if accepted:
        assert set(ranks(done)) == {0, 1}
    else:
        assert done.returncode != 0
        assert "Host key verification failed" in done.stdout
@pytest.mark.parametrize(("starter", "handed_on"), [
    ("native", 3), ("mpirun", 3), ("horovodrun", 0)])
def test_the_secret_of_a_job_stands_on_no_command_line(
        hosts: VirtualHosts, starter: str, handed_on: int, tmp_path: Path) -> None:
    """horovodrun, which would write it there, does not get it."""
    secret = "0123456789abcdef" * 4
    text = (f"echo x >> {tmp_path}/ranks; while [ ! -e {tmp_path}/end ]; do sleep 0.1; done; "
            'echo "secret:$HVDTRAIN_SECRET"')
    process = hosts.start("hosta", [
        *LAUNCH, "-H", "hosta:2,hostb:1", "--starter", starter, "--network-interface", "eth0",
        "--", "bash", "-c", text], cwd=ROOT, env=ENV | {"HVDTRAIN_SECRET": secret})
    deadline = time.monotonic() + 60
    began = tmp_path / "ranks"
    while process.poll() is None and time.monotonic() < deadline and (
            not began.exists() or len(began.read_text()) < 6):
        time.sleep(0.1)
    lines = [line for name in hosts.names for line in hosts.processes(name).values()]
    (tmp_path / "end").touch()
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0, out
    assert out.count(f"secret:{secret}") == handed_on, out
    assert not [line for line in lines if secret in line]


def test_mpirun_keeps_to_the_network_that_is_named(fragile_hosts: VirtualHosts) -> None:
    """A second network that leads nowhere would hang the ranks."""
    for name in ("hosta", "hostb"):
        fragile_hosts.interface(name, "dead0", f"10.99.0.{ord(name[-1]) - 96}/24")
    done = fragile_hosts.run("hosta", [
        *LAUNCH, "-H", "hosta:2,hostb:1", "--starter", "mpirun", "--network-interface",
        "10.77.0.0/24", "--", *RANK], cwd=ROOT, env=ENV, timeout=60)
    assert places(ranks(done)) == PLACES


def in_job(slurm: PrivateSlurm, words: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command line in an allocation of 2 nodes with 2 tasks each."""
    return slurm.run(["salloc", "-Q", "-N2", "--ntasks-per-node=2", *options, "bash", "-c", words],
                     cwd=ROOT, env=ENV, timeout=90)


FOUR = {0: ("hosta", [0, 4, 0, 2]), 1: ("hosta", [1, 4, 1, 2]), 2: ("hostb", [2, 4, 0, 2]),
        3: ("hostb", [3, 4, 1, 2])}


def test_launch_in_a_slurm_job_uses_srun_and_all_tasks(slurm: PrivateSlurm) -> None:
    done = in_job(slurm, f"{' '.join(LAUNCH)} -- {' '.join(RANK)}")
    found = ranks(done)
    assert places(found) == FOUR
    assert {rank["starter"] for rank in found.values()} == {"slurm"}


def test_launch_in_a_slurm_job_places_some_ranks_as_planned(slurm: PrivateSlurm) -> None:
    done = in_job(slurm, f"{' '.join(LAUNCH)} -np 3 -- {' '.join(RANK)}")
    assert places(ranks(done)) == PLACES
    done = in_job(slurm, f"{' '.join(LAUNCH)} -H hostb:3 -- {' '.join(RANK)}")
    assert {rank["host"] for rank in ranks(done).values()} == {"hostb"}


def test_srun_without_a_launcher(slurm: PrivateSlurm) -> None:
    for mpi in ("none", "pmi2", "pmix"):
        done = in_job(slurm, f"srun --mpi={mpi} {' '.join(RANK)}")
        assert places(ranks(done)) == FOUR, mpi


def test_srun_with_pmix_starts_horovod_over_mpi(slurm: PrivateSlurm) -> None:
    line = (f"{' '.join(LAUNCH)} --starter srun --collective horovod-mpi -- "
            f"{' '.join(RANK)} --bare")
    found = ranks(in_job(slurm, line))
    assert places(found) == FOUR
    assert {rank["mpi"] for rank in found.values()} == {True}


def test_mpirun_in_a_slurm_job(slurm: PrivateSlurm) -> None:
    line = f"{' '.join(LAUNCH)} --starter mpirun -- {' '.join(RANK)}"
    found = ranks(in_job(slurm, line))
    assert places(found) == FOUR
    assert {rank["starter"] for rank in found.values()} == {"openmpi"}


def test_the_code_of_a_failing_task_is_that_of_the_launch(slurm: PrivateSlurm) -> None:
    line = f"{' '.join(LAUNCH)} -- bash -c '[ $SLURM_PROCID = 2 ] && exit 7; sleep 60'"
    assert in_job(slurm, line).returncode == 7


def test_words_reach_the_tasks_of_srun_unchanged(slurm: PrivateSlurm, tmp_path: Path) -> None:
    program = tmp_path / "show me.py"
    program.write_text("import json, os, sys\nprint(json.dumps(['x', *sys.argv[1:], "
                       "os.environ['A']]))\n", encoding="utf-8")
    words = [str(program), "a b;c", "$(id)", "'\"", ""]
    done = slurm.run(["salloc", "-Q", "-N2", "--ntasks-per-node=2", *LAUNCH, "-np", "1", "-x",
                      "A=1,B=2; \"c\" 'd'", "--", sys.executable, *words], cwd=ROOT, env=ENV)
    found = re.findall(r"^\[0\] (\[.*)$", done.stdout, flags=re.MULTILINE)
    assert [json.loads(line) for line in found] == [
        ["x", *words[1:], "1,B=2; \"c\" 'd'"]], done.stdout


def test_a_tfjob_starts_itself_though_its_names_are_known_late(fragile_hosts: VirtualHosts) -> None:
    """Kubernetes publishes the names of pods some time after they have started."""
    cluster = {"chief": ["job-chief-0:2222"], "worker": ["job-worker-0:2222"]}
    processes = [
        fragile_hosts.start(host, RANK, cwd=ROOT, env=ENV | {"TF_CONFIG": json.dumps(
            {"cluster": cluster, "task": {"type": kind, "index": 0}})})
        for host, kind in (("hosta", "chief"), ("hostb", "worker"))]
    time.sleep(2.0)
    names = "".join(f"{fragile_hosts.address(host)} {name}\\n" for host, name in (
        ("hosta", "job-chief-0"), ("hostb", "job-worker-0")))
    fragile_hosts.run("hosta", ["bash", "-c", f"printf '{names}' >> /etc/hosts"])
    said = [process.communicate(timeout=40)[0] for process in processes]
    found = ranks(subprocess.CompletedProcess([], max(p.returncode for p in processes),
                                              "".join(said)))
    assert {rank: (r["host"], r["place"][:2], r["starter"]) for rank, r in found.items()} == {
        0: ("hosta", [0, 2], "tf_config"), 1: ("hostb", [1, 2], "tf_config")}


def test_a_name_that_is_never_known_is_told(hosts: VirtualHosts) -> None:
    config = {"cluster": {"worker": ["nowhere-0:1", "nowhere-1:1"]},
              "task": {"type": "worker", "index": 1}}
    program = ("import os; from hvdtrain.world import detect_world; "
               "from hvdtrain.rendezvous.bootstrap import bootstrap; "
               "bootstrap(detect_world(os.environ), os.environ, timeout_s=1.0)")
    done = hosts.run("hosta", [sys.executable, "-c", program], cwd=ROOT,
                     env=ENV | {"TF_CONFIG": json.dumps(config)})
    assert "The host name nowhere-0 cannot be resolved" in done.stdout


@pytest.mark.parametrize("starter", ["mpirun", "horovodrun"])
def test_what_the_user_types_reaches_other_hosts_unchanged(hosts: VirtualHosts, starter: str,
                                                           tmp_path: Path) -> None:
    folder = tmp_path / ("a folder; touch $HOME `id` '\"" if starter == "mpirun" else "plain")
    folder.mkdir()
    program = folder / "show me; $HOME `id` '\".py"
    program.write_text("import json, os, sys\nprint(json.dumps(['x', os.getcwd(), *sys.argv[1:], "
                       "os.environ['A_1']]))\n", encoding="utf-8")
    words = ["two words", "semi;colon", "$(id)", "`id`", "a'b\"c", "*", "back\\slash", "--x=y z"]
    value = "x; echo 'no' \"no\" $(no) `no` *"
    done = hosts.run("hosta", [
        *LAUNCH, "-H", "hosta:1,hostb:1", "--starter", starter, "--network-interface", "eth0",
        "-x", f"A_1={value}", "--", sys.executable, str(program), *words], cwd=folder,
        env=ENV, timeout=90)
    found = re.findall(r"^\[\d\] (\[\"x\".*)$", done.stdout, flags=re.MULTILINE)
    assert [json.loads(line) for line in found] == [
        ["x", str(folder), *words, value]] * 2, done.stdout


@pytest.mark.parametrize("starter", ["mpirun", "horovodrun"])
def test_names_that_a_shell_cannot_assign(hosts: VirtualHosts, starter: str) -> None:
    done = hosts.run("hosta", [
        *LAUNCH, "-H", "hosta:1,hostb:1", "--starter", starter, "--network-interface", "eth0",
        "-x", "B.C-D=1", "--", sys.executable, "-c", "import os; print('<' + os.environ['B.C-D'])"],
        cwd=ROOT, env=ENV, timeout=90)
    assert done.stdout.count("<1") == 2, done.stdout


def test_horovodrun_is_not_started_in_a_folder_that_it_cannot_name(hosts: VirtualHosts,
                                                                   tmp_path: Path) -> None:
    """It writes `cd FOLDER` for the other hosts' shells, without quotes."""
    folder = tmp_path / "x; touch $HOME"
    folder.mkdir()
    done = hosts.run("hosta", [*LAUNCH, "-H", "hosta:1,hostb:1", "--starter", "horovodrun", "--",
                               "true"], cwd=folder, env=ENV)
    assert done.returncode == 2
    assert "horovodrun cannot be used on other hosts from the folder" in done.stdout
