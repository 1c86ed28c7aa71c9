"""Which starter, with which command line: whole texts, from options and facts alone."""

import os
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import ConfigError, LaunchError
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.launch.plan import LaunchPlan, make_plan
from hvdtrain.launch.render import render
from tests.launch_facts import MPICH, OPENMPI_4, facts

GOLDEN = Path(__file__).parents[2] / "golden" / "launch"
FIT = ("/opt/venv/bin/python", "-m", "hvdtrain", "fit", "job.toml", "--epochs", "3")
NO_HOROVOD = {"horovod_ok": False, "horovod_gloo": False, "horovod_mpi_kind": None,
              "horovod_problem": "Horovod is not installed"}


def plan(environ: dict[str, str] | None = None, machine: dict[str, object] | None = None,
         **options: Any) -> LaunchPlan:
    options = {"command": FIT, "np": 4} | options
    return make_plan(LaunchOptions(**options), environ or {}, facts(**(machine or {})))


CASES: dict[str, dict[str, Any]] = {
    "native": {},
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


@pytest.mark.parametrize(("options", "machine", "message"), [
    ({"collective": "horovod-mpi"}, {"mpirun": MPICH},
     r"with openmpi, but /opt/mpich/bin/mpirun is mpich 5\.0\.2: each rank would train alone"),
    ({"collective": "horovod-mpi"}, {"horovod_mpi_kind": None}, "built without MPI"),
    ({"collective": "horovod-mpi"}, NO_HOROVOD, "Horovod is not installed"),
    ({"collective": "horovod-gloo"}, NO_HOROVOD, "build-horovod --install"),
    ({"collective": "mpi4py"}, {"mpirun": None}, r"no mpirun in /opt/venv/bin"),
    ({"collective": "mpi4py", "starter": "native"}, {}, "Use --starter mpirun"),
    ({"collective": "horovod-gloo", "starter": "mpirun"}, {}, "Use --starter native"),
    ({"starter": "horovodrun"}, NO_HOROVOD, "horovodrun needs Horovod"),
    ({}, NO_HOROVOD | {"mpirun": None}, "Nothing here can reduce over 4 ranks"),
    ({"starter": "mpirun", "output": Path("x")}, {}, "Leave out --output"),
    ({"np": None}, {}, "number of ranks is not given"),
    ({"hosts": "hosta:2,hostb:2"}, {}, r"not on hostb(.|\n)*horovodrun --gloo -np 4 -H hosta:2"),
    ({"env": ("NOT_SET",)}, {}, "--env NOT_SET: the variable is not set here"),
])
def test_what_cannot_work_is_refused_with_the_way_out(
        options: dict[str, Any], machine: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        plan(machine=machine, **options)


@pytest.mark.parametrize(("options", "message"), [
    ({"starter": "srun"}, "Unknown starter 'srun'.*native"),
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


def test_an_allocation_of_several_nodes_is_pointed_to_srun() -> None:
    with pytest.raises(LaunchError, match=r"srun --mpi=none -n 4 /opt/venv/bin/python -m hvdtrain"):
        plan({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"})


def test_an_allocation_of_one_node_is_used() -> None:
    assert plan({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}).starter == "native"


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
