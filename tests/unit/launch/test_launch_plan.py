"""Which starter, with which command line: whole texts, from options and facts alone."""

import os
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import ConfigError, LaunchError
from hvdtrain.launch.options import ElasticOptions, LaunchOptions
from hvdtrain.launch.plan import LaunchPlan, make_plan
from hvdtrain.launch.remote_shell import RemoteOptions
from hvdtrain.launch.render import render
from hvdtrain.preload.client import SOCKET_VARIABLE
from tests.launch_facts import MPICH, OPENMPI_4, facts

GOLDEN = Path(__file__).parents[2] / "golden" / "launch"
FIT = ("/opt/venv/bin/python", "-m", "hvdtrain", "fit", "job.toml", "--epochs", "3")
NO_HOROVOD = {"horovod_ok": False, "horovod_gloo": False, "horovod_mpi_kind": None,
              "horovod_problem": "Horovod is not installed"}
BROKEN = NO_HOROVOD | {"horovod_problem": "libmpi.so.40 is missing"}


HOSTS = {"np": None, "hosts": "hosta:2,hostb:1,hostc:1"}
REMOTE = HOSTS | {"network_interface": ("10.1.0.0/16", "ib0"), "remote": RemoteOptions(
    port=2222, identity_file=Path("/keys/cluster"))}
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)",
       "SLURM_NTASKS": "4"}


def plan(environ: dict[str, str] | None = None, machine: dict[str, object] | None = None,
         **options: Any) -> LaunchPlan:
    options = {"command": FIT, "np": 4} | options
    return make_plan(LaunchOptions(**options), environ or {}, facts(**(machine or {})))


CASES: dict[str, dict[str, Any]] = {
    "native": {},
    "native_preload": {"preload": True},
    "native_everything": {
        "np": None, "hosts": "localhost:2", "env": ("API_TOKEN=abc", "NAME=two words"),
        "output": Path("logs dir"), "timeout_s": 90.0, "machine": {"cores": 5}},
    "native_other_mpi": {"machine": {"mpirun": MPICH}},
    "horovodrun": {"starter": "horovodrun"},
    "openmpi_5": {"starter": "mpirun"},
    "openmpi_5_root_more_ranks_than_cores": {
        "starter": "mpirun", "env": ("API_TOKEN=abc",), "machine": {"is_root": True, "cores": 2}},
    "openmpi_4": {"collective": "horovod-mpi", "machine": {"mpirun": OPENMPI_4}},
    "mpich": {"collective": "mpi4py",
              "machine": {"mpirun": MPICH, "horovod_mpi_kind": "mpich"}},
    "no_horovod": {"machine": NO_HOROVOD},
    "native_hosts": REMOTE,
    "openmpi_5_hosts": REMOTE | {"starter": "mpirun", "env": ("NAME=two words",), "environ": {
        "PATH": "/bin", "NCCL_DEBUG": "INFO", "HOROVOD_RANK": "0", "OTHER": "x"}},
    "openmpi_4_hosts": REMOTE | {"starter": "mpirun", "machine": {"mpirun": OPENMPI_4}},
    "mpich_hosts": HOSTS | {"collective": "mpi4py", "network_interface": ("ib0",), "machine": {
        "mpirun": MPICH, "horovod_mpi_kind": "mpich"}},
    "horovodrun_hosts": REMOTE | {
        "starter": "horovodrun", "network_interface": ("ib0",), "elastic": ElasticOptions(
            min_np=2, max_np=8, elastic_timeout_s=60, reset_limit=3)},
    "horovodrun_discovery": {"starter": "horovodrun", "elastic": ElasticOptions(
        min_np=2, host_discovery_script=Path("./my hosts.sh"), slots_per_host=4)},
    "horovodrun_mpi": {"starter": "horovodrun", "collective": "horovod-mpi"},
    "srun": {"np": None, "environ": JOB, "machine": {"srun": "/usr/bin/srun"}},
    "srun_some": {"np": 3, "environ": JOB | {"SLURM_CPUS_PER_TASK": "6"},
                  "network_interface": ("10.1.0.0/16",), "machine": {"srun": "/usr/bin/srun"}},
    "srun_named_hosts": {"np": None, "hosts": "node2:3", "environ": JOB,
                         "machine": {"srun": "/usr/bin/srun"}},
}


@pytest.mark.parametrize("name", CASES)
def test_dry_run_text_is_the_golden_one(name: str) -> None:
    text = render(plan(**CASES[name]))
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "accept it with UPDATE_GOLDEN=1"


def test_every_golden_text_is_tested() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize(("options", "machine", "starter"), [
    ({}, {}, "native"),
    ({"np": 1}, NO_HOROVOD | {"mpirun": None}, "native"),
    ({"collective": "horovod-gloo"}, {}, "native"),
    ({"collective": "horovod-mpi"}, {}, "mpirun"),
    ({"collective": "mpi4py"}, {}, "mpirun"),
    ({}, {"horovod_gloo": False}, "mpirun"),
    ({}, NO_HOROVOD, "mpirun"),
    ({"starter": "native"}, NO_HOROVOD | {"mpirun": None}, "native"),
    ({}, {"mpirun": MPICH}, "native"),
])
def test_auto_takes_what_can_work(options: dict[str, Any], machine: dict[str, object],
                                  starter: str) -> None:
    assert plan(machine=machine, **options).starter == starter


@pytest.mark.parametrize(("options", "machine", "notes"), [
    ({"np": 1}, {"mpirun": MPICH}, []),
    ({}, {"mpirun": MPICH},
     ["Gloo is used: Horovod was built with openmpi, but /opt/mpich/bin/mpirun is mpich"]),
    ({}, {"mpirun": MPICH, "horovod_mpi_kind": None}, []),
    ({"starter": "mpirun"}, {"mpirun": MPICH},
     ["mpi4py is used: Horovod was built with openmpi, but /opt/mpich/bin/mpirun is mpich"]),
    ({"starter": "mpirun"}, {"mpirun": MPICH, "horovod_mpi_kind": "mpich"}, []),
    ({"starter": "mpirun"}, {"mpirun": MPICH, "horovod_mpi_kind": None}, []),
    ({"starter": "mpirun"}, NO_HOROVOD | {"mpirun": MPICH}, []),
    ({}, BROKEN, ["starter mpirun with mpi4py, because: libmpi.so.40 is missing"]),
    ({}, BROKEN | {"horovod_problem": None},
     ["starter mpirun with mpi4py, because: Horovod is not installed"]),
])
def test_what_the_user_should_know_of_the_choice(
        options: dict[str, Any], machine: dict[str, object], notes: list[str]) -> None:
    assert list(plan(machine=machine, **options).notes) == notes


@pytest.mark.parametrize(("options", "machine", "message"), [
    ({"collective": "horovod-mpi"}, {"mpirun": MPICH},
     r"with openmpi, but /opt/mpich/bin/mpirun is mpich 5\.0\.2: each rank would train alone"),
    ({"collective": "horovod-mpi"}, {"horovod_mpi_kind": None}, "built without MPI"),
    ({"collective": "horovod-mpi"}, NO_HOROVOD, "Horovod is not installed"),
    ({"collective": "horovod-gloo"}, NO_HOROVOD, "build-horovod --install"),
    ({"collective": "mpi4py"}, {"mpirun": None}, r"no mpirun in /opt/venv/bin"),
    ({"collective": "horovod-gloo"}, BROKEN, "was asked for, but: libmpi"),
    ({"collective": "mpi4py", "starter": "native"}, {}, "Use --starter mpirun"),
    ({"collective": "horovod-mpi", "starter": "native"}, {}, "Use --starter mpirun"),
    ({"collective": "mpi4py", "starter": "horovodrun"}, {}, "Use --starter mpirun"),
    ({"collective": "horovod-gloo", "starter": "mpirun"}, {}, "Use --starter native"),
    ({"starter": "horovodrun"}, BROKEN, r"needs Horovod: libmpi\.so\.40 is missing\. Install it"),
    ({"starter": "horovodrun"}, NO_HOROVOD | {"horovod_problem": None},
     "horovodrun needs Horovod: it is not installed"),
    ({}, NO_HOROVOD | {"mpirun": None}, "Nothing here can reduce over 4 ranks"),
    ({"np": None}, {}, "number of ranks is not given"),
    ({"starter": "srun"}, {}, "no srun on PATH"),
    ({"starter": "srun"}, {"srun": "/usr/bin/srun"}, "SLURM_JOB_ID is not set"),
    ({"hosts": "hosta:2,localhost:2"}, {}, "hosta, localhost are the same host"),
    (HOSTS | {"starter": "horovodrun", "elastic": ElasticOptions(
        host_discovery_script=Path("x"))}, {}, "and a --host-discovery-script too"),
    ({"elastic": ElasticOptions(min_np=1)}, {}, "--min-np is an option of horovodrun"),
    ({"starter": "horovodrun", "network_interface": ("10.0.0.0/8",)}, {}, "takes names"),
    (REMOTE | {"starter": "mpirun", "remote": RemoteOptions(identity_file=Path("/my keys/k"))},
     {}, "cannot pass the path '/my keys/k'"),
    (REMOTE | {"starter": "horovodrun", "network_interface": (),
               "remote": RemoteOptions(identity_file=Path("/k;reboot"))}, {}, "cannot pass"),
    ({"env": ("NOT_SET",)}, {}, "--env NOT_SET: the variable is not set here"),
])
def test_what_cannot_work_is_refused_with_the_way_out(
        options: dict[str, Any], machine: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        plan(machine=machine, **options)


@pytest.mark.parametrize(("options", "message"), [
    ({"starter": "qsub"}, "Unknown starter 'qsub'.*native"),
    ({"network_interface": ("10.0.0.0/99",)}, "--network-interface 10.0.0.0/99"),
    ({"network_interface": ("two words",)}, "--network-interface is 'two words'"),
    ({"collective": "nccl"}, "Unknown collective 'nccl'"),
    ({"command": ()}, "nothing to start"),
    ({"hosts": "a:1", "hostfile": Path("f")}, "Both -H and --hostfile"),
    ({"timeout_s": -1.0}, "--timeout is -1 s"),
    ({"env": ("=x",)}, "--env is '=x'"),
    ({"np": 0}, "Expected at least 1"),
    ({"hosts": "localhost:2"}, "localhost:2 has 2 slots"),
])
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**options)


@pytest.mark.parametrize("environ", [
    {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"},
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    {"PMI_RANK": "1", "PMI_SIZE": "2"},
    {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"},
])
def test_a_launch_inside_a_rank_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="each of them would start the whole job"):
        plan(environ)


def test_a_slurm_job_is_started_by_srun() -> None:
    made = plan(JOB, {"srun": "/usr/bin/srun"}, np=None)
    assert (made.starter, [slot.host for slot in made.slots]) == (
        "srun", ["node1", "node1", "node2", "node2"])


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST"])
def test_half_of_the_variables_of_a_slurm_job_make_none(name: str) -> None:
    made = plan({name: JOB[name]}, {"srun": "/usr/bin/srun"}, np=2)
    assert (made.starter, made.slots[0].host) == ("native", "localhost")


def test_more_ranks_than_tasks_are_refused_with_what_to_ask_slurm_for() -> None:
    with pytest.raises(ConfigError, match=r"has 4 slots in all(.|\n)*sbatch --ntasks"):
        plan(JOB, {"srun": "/usr/bin/srun"}, np=5)


def test_more_ranks_than_named_slots_are_nothing_to_ask_slurm_for(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node1 slots=2\n", encoding="utf-8")
    for named in ({"hosts": "node1:2"}, {"hostfile": hostfile}):
        with pytest.raises(ConfigError, match="node1:2 has 2 slots in all") as caught:
            plan(JOB, {"srun": "/usr/bin/srun"}, np=3, **named)
        assert "sbatch" not in str(caught.value)


def test_a_host_outside_of_the_slurm_job_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"node9 is not a node of this Slurm job.*node1, node2"):
        plan(JOB, {"srun": "/usr/bin/srun"}, np=None, hosts="node1:2,node9:2")


def test_hosts_of_an_mpijob_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("job-worker-0.job-worker.ns.svc slots=2\njob-worker-1.job-worker.ns.svc "
                        "slots=2\n", encoding="utf-8")
    monkeypatch.setattr("hvdtrain.launch.places.MPIJOB_HOSTFILE", hostfile)
    made = plan({"K_MPI_JOB_ROLE": "launcher"}, np=None)
    assert (made.np, made.slots[3].host, made.start_timeout_s) == (
        4, "job-worker-1.job-worker.ns.svc", 300.0)
    assert plan({"K_MPI_JOB_ROLE": "worker"}, np=2).slots[0].host == "localhost"
    assert plan({}, np=2).slots[0].host == "localhost"


def test_a_kubexec_script_is_used_in_place_of_ssh(tmp_path: Path) -> None:
    script = tmp_path / "kubexec.sh"
    script.write_text('#!/bin/sh\nset -x\nPOD_NAME=$1\nshift\n/opt/kube/kubectl exec ${POD_NAME} '
                      '--container main -- /bin/sh -c "$*"\n', encoding="utf-8")
    made = plan({"OMPI_MCA_plm_rsh_agent": str(script)}, hosts="pod-0:4")
    assert made.remote.kubectl == ("/opt/kube/kubectl", "--container", "main")
    script.write_text("exec something else\n", encoding="utf-8")
    with pytest.raises(LaunchError, match="holds no line"):
        plan({"OMPI_MCA_plm_rsh_agent": str(script)}, hosts="pod-0:4")


@pytest.mark.parametrize("starter", ["srun", "mpirun", "horovodrun"])
def test_only_the_native_starter_forks_ranks(starter: str) -> None:
    where = {"environ": JOB, "machine": {"srun": "/usr/bin/srun"}} if starter == "srun" else {}
    with pytest.raises(LaunchError, match=f"--preload is of the starter native, but .* {starter}"):
        plan(starter=starter, preload=True, **where)
    named = {SOCKET_VARIABLE: "/tmp/x/socket"}
    assert not plan(starter=starter, environ=named | where.get("environ", {}),
                    machine=where.get("machine")).preload
    assert plan(environ=named).preload


def test_values_of_the_user_stay() -> None:
    assert plan({"OMP_NUM_THREADS": "3", "TF_CPP_MIN_LOG_LEVEL": "0"}).env == {
        "PYTHONUNBUFFERED": "1"}
    assert plan(env=("OMP_NUM_THREADS=5",)).env["OMP_NUM_THREADS"] == "5"


def test_a_variable_without_value_is_passed_on() -> None:
    assert plan({"DATA": "/d"}, env=("DATA",)).env["DATA"] == "/d"


def test_hosts_come_from_a_hostfile(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("hosta slots=3\n", encoding="utf-8")
    made = plan(np=None, hostfile=hostfile)
    assert (made.np, made.slots[2].local_rank) == (3, 2)
