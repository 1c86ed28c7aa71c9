"""Which starter, with which command line: whole texts, from values alone; and its messages."""

import os
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import ConfigError, LaunchError
from hvdtrain.launch.by_starter import ExitReader
from hvdtrain.launch.options import LaunchOptions, RemoteOptions
from hvdtrain.launch.plan import LaunchPlan, make_plan, render
from hvdtrain.launch.starters import starter_named
from hvdtrain.launch.starters.base import RankExit
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
    "native_tree": {"np": None, "hosts": "hosta:1,hostb:2,hostc:1,hostd:1,hoste:1",
                    "ssh_fanout": 2},
    "openmpi_5_hosts": REMOTE | {"starter": "mpirun", "env": ("NAME=two words",), "environ": {
        "PATH": "/bin", "NCCL_DEBUG": "INFO", "HOROVOD_RANK": "0", "OTHER": "x"}},
    "openmpi_4_hosts": REMOTE | {"starter": "mpirun", "machine": {"mpirun": OPENMPI_4}},
    "mpich_hosts": HOSTS | {"collective": "mpi4py", "network_interface": ("ib0",), "machine": {
        "mpirun": MPICH, "horovod_mpi_kind": "mpich"}},
    "horovodrun_hosts": REMOTE | {
        "starter": "horovodrun", "network_interface": ("ib0",)},
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
    ({}, NO_HOROVOD, "native"),
    ({"hosts": "hosta:2,hostb:2"}, NO_HOROVOD, "mpirun"),
    ({"collective": "shared-memory"}, {}, "native"),
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
    ({}, BROKEN, ["the ranks reduce in shared memory, because: libmpi.so.40 is missing"]),
    ({"hosts": "hosta:2,hostb:2"}, BROKEN,
     ["starter mpirun with mpi4py, because: libmpi.so.40 is missing"]),
    ({"hosts": "hosta:2,hostb:2"}, BROKEN | {"horovod_problem": None},
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
    ({"hosts": "hosta:2,hostb:2"}, NO_HOROVOD | {"mpirun": None},
     "Nothing here can reduce over 4 ranks"),
    ({"hosts": "hosta:2,hostb:2", "collective": "shared-memory"}, {}, "ranks on one host"),
    ({"np": None}, {}, "number of ranks is not given"),
    ({"starter": "srun"}, {}, "no srun on PATH"),
    ({"starter": "srun"}, {"srun": "/usr/bin/srun"}, "SLURM_JOB_ID is not set"),
    ({"hosts": "hosta:2,localhost:2"}, {}, "hosta, localhost are the same host"),
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
    ({"starter": "qsub"}, "starter must be one of 'auto'.*'native'.*'qsub'"),
    ({"network_interface": ("10.0.0.0/99",)}, "--network-interface 10.0.0.0/99"),
    ({"network_interface": ("two words",)}, "--network-interface is 'two words'"),
    ({"collective": "nccl"}, "collective must be one of .*'nccl'"),
    ({"command": ()}, "nothing to start"),
    ({"hosts": "a:1", "hostfile": Path("f")}, "Both -H and --hostfile"),
    ({"timeout_s": -1.0}, "timeout_s must be at least 0"),
    ({"ssh_fanout": 1}, "ssh_fanout must be at least 2"),
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
    monkeypatch.setattr("hvdtrain.hosts.MPIJOB_HOSTFILE", hostfile)
    made = plan({"K_MPI_JOB_ROLE": "launcher"}, np=None)
    assert (made.np, made.slots[3].host, made.start_timeout_s) == (
        4, "job-worker-1.job-worker.ns.svc", 300.0)
    assert plan({"K_MPI_JOB_ROLE": "worker"}, np=2).slots[0].host == "localhost"
    assert plan({}, np=2).slots[0].host == "localhost"


@pytest.mark.parametrize("starter", ["srun", "mpirun", "horovodrun"])
def test_only_the_native_starter_forks_ranks(starter: str) -> None:
    where = {"environ": JOB, "machine": {"srun": "/usr/bin/srun"}} if starter == "srun" else {}
    with pytest.raises(LaunchError, match=f"--preload is of the starter native, but .* {starter}"):
        plan(starter=starter, preload=True, **where)
    named = {SOCKET_VARIABLE: "/tmp/x/socket"}
    assert not plan(starter=starter, environ=named | where.get("environ", {}),
                    machine=where.get("machine")).preload
    assert plan(environ=named).preload


@pytest.mark.parametrize("starter", ["mpirun", "horovodrun"])
def test_only_the_native_starter_has_our_tree(starter: str) -> None:
    with pytest.raises(LaunchError, match=f"--ssh-fanout is of .* native, but .* {starter}"):
        plan(starter=starter, ssh_fanout=8)


def test_a_plan_for_many_hosts_grows_with_them() -> None:
    """Each rank's place was counted over all hosts: 0.4 s of 1000 hosts with 8 ranks each."""
    made = plan(np=None, hosts=",".join(f"node{n}:{3 if n % 2 else 2}" for n in range(100)))
    place = {(slot.host, slot.local_rank): (slot.cross_rank, slot.cross_size)
             for slot in made.slots}
    assert place["node99", 0] == (99, 100)
    assert place["node99", 2] == (49, 50)
    assert place["node98", 1] == (98, 100)


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


#: Real messages of real starters about a rank that has ended.
SAID = [
    ("srun", "srun: error: hostb: task 2: Exited with exit code 7", RankExit(2, 7)),
    ("srun", "srun: error: hosta: tasks 0-1: Exited with exit code 75", RankExit(0, 75)),
    ("srun", "srun: error: hostb: task 2: Killed", RankExit(2, -9)),
    ("srun", "srun: error: hostb: task 2: Segmentation fault (core dumped)", RankExit(2, -11)),
    ("mpirun", "prterun noticed that process rank 1 with PID 344 on node hostb exited on\n"
               "signal 9 (Killed).", RankExit(1, -9)),
    ("mpirun", "mpirun noticed that process rank 3 with PID 0 on node n exited on signal 11 "
               "(Segmentation fault).", RankExit(3, -11)),
    ("mpirun", "   Process name: [prterun-hosta-6@1,1]\n   Exit code:    7", RankExit(1, 7)),
    ("mpirun", "  Process name: [[62115,1],12]\n  Exit code:    3", RankExit(12, 3)),
    ("mpirun", "prterun has exited due to process rank 1 with PID 7132 on node vm exiting\n"
               "improperly. There are three reasons this could occur:",
     RankExit(1, 1, "left early with code 0")),
    ("mpirun", "prterun has exited due to process rank 0 with PID 0 on node hosta calling\n"
               '"abort". This may have caused other processes in the application to be',
     RankExit(0, 1, "called MPI_Abort")),
    ("horovodrun", "Process 1 exit with status code 7.", RankExit(1, 7)),
]


@pytest.mark.parametrize(("starter", "text", "expected"), SAID)
def test_the_end_of_a_rank_is_read(starter: str, text: str, expected: RankExit) -> None:
    exits = ExitReader(starter_named(starter))
    assert [end for line in text.splitlines() if (end := exits.read(line))] == [expected]


@pytest.mark.parametrize("starter", ["srun", "mpirun", "horovodrun"])
def test_other_lines_tell_of_no_end(starter: str) -> None:
    exits = ExitReader(starter_named(starter))
    for line in ("srun: forcing job termination", "Process name: 1", "Exit code: 7", "-----", "",
                 "thus causing the job to be terminated. The first process to do so was:"):
        assert exits.read(line) is None
