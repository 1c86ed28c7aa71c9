"""Who am I, under every starter: variable sets as the starters leave them."""

import json

import pytest

from hvdtrain.errors import WorldError
from hvdtrain.world import World, detect_world, explain

# Three ranks on hosta:2,hostb:1, seen from rank 2, as each starter left them.
HOROVODRUN = {
    "HOROVOD_RANK": "2", "HOROVOD_SIZE": "3", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1",
    "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "HOROVOD_HOSTNAME": "hostb",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.77.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "41235",
    "HOROVOD_GLOO_IFACE": "eth0", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_NODE_RANK": "0", "PMIX_RANK": "2",
    "PMIX_VERSION": "5.0.11rc1"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NODELIST": "hosta,hostb",
    "SLURMD_NODENAME": "hostb"}
TF_CONFIG = {"TF_CONFIG": json.dumps({
    "cluster": {"chief": ["hosta:2222"], "worker": ["hosta:2223", "hostb:2222"]},
    "task": {"type": "worker", "index": 1}})}
# What Slurm gives the ranks that Open MPI's daemon starts on another node: those of the daemon.
SLURM_OF_PRTED = SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1",
                          "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "1",
                          "SLURM_STEP_NODELIST": "hostb"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0",
         "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "hosta,hostb"}


def without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


@pytest.mark.parametrize(("environ", "starter", "rendezvous", "cross", "host"), [
    (HOROVODRUN, "horovodrun", "gloo", (1, 2), "hostb"),
    (HOROVODRUN | {"HVDTRAIN_STARTER": "native"}, "native", "gloo", (1, 2), "hostb"),
    (OPENMPI, "openmpi", "mpi", (None, None), "here"),
    (OPENMPI | SLURM_OF_PRTED, "openmpi", "mpi", (None, None), "here"),
    (HYDRA, "hydra", "mpi", (None, None), "here"),
    (HYDRA | SLURM_OF_PRTED, "hydra", "mpi", (None, None), "here"),
    (SLURM, "slurm", "bootstrap", (1, 2), "hostb"),
    (SLURM | {"PMIX_RANK": "2"}, "slurm", "bootstrap", (1, 2), "hostb"),
    (SLURM | {"PMI_RANK": "2", "PMI_SIZE": "3"}, "slurm", "bootstrap", (1, 2), "hostb"),
    (without(SLURM, "SLURM_STEP_NUM_TASKS"), "slurm", "bootstrap", (1, 2), "hostb"),
])
def test_every_starter_is_told_apart(environ: dict[str, str], starter: str, rendezvous: str,
                                     cross: tuple[int | None, int | None], host: str) -> None:
    world = detect_world(environ, hostname="here")
    assert (world.rank, world.size, world.local_rank, world.local_size) == (2, 3, 0, 1)
    assert (world.starter, world.rendezvous, world.host) == (starter, rendezvous, host)
    assert (world.cross_rank, world.cross_size) == cross
    assert world.evidence.items() <= environ.items()


@pytest.mark.parametrize(("rank", "local_rank", "node", "host", "local_size", "cross"), [
    (0, 0, 0, "hosta", 1, (0, 3)),
    (1, 0, 1, "hostb", 3, (1, 3)),
    (2, 1, 1, "hostb", 3, (0, 2)),
    (3, 2, 1, "hostb", 3, (0, 1)),
    (4, 0, 2, "hostc", 2, (2, 3)),
    (5, 1, 2, "hostc", 2, (1, 2)),
])
def test_every_task_of_a_slurm_step_finds_its_place(
        rank: int, local_rank: int, node: int, host: str, local_size: int,
        cross: tuple[int, int]) -> None:
    world = detect_world(without(SLURM, "SLURMD_NODENAME") | {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank), "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "1,3,2",
        "SLURM_STEP_NODELIST": "hosta,hostb,hostc"})
    assert (world.rank, world.size) == (rank, 6)
    assert (world.host, world.local_rank, world.local_size) == (host, local_rank, local_size)
    assert (world.cross_rank, world.cross_size) == cross


def test_slurm_step_knows_all_hosts() -> None:
    world = detect_world(SLURM)
    assert (world.hosts, world.slots) == (("hosta", "hostb"), (2, 1))


def test_tf_config_ranks_by_place_in_the_cluster() -> None:
    assert detect_world(TF_CONFIG, hostname="pod") == World(
        rank=2, size=3, local_rank=0, local_size=1, cross_rank=2, cross_size=3, host="hostb",
        starter="tf_config", rendezvous="bootstrap", evidence=TF_CONFIG,
        hosts=("hosta", "hosta", "hostb"), slots=(1, 1, 1))


def test_nothing_set_is_a_single_process() -> None:
    assert detect_world({"PATH": "/bin"}, hostname="here") == World(
        rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1, host="here",
        starter="single", rendezvous="none", evidence={}, hosts=("here",), slots=(1,))


def test_all_ranks_on_one_host_tell_that_host() -> None:
    world = detect_world(OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3",
                                    "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, hostname="here")
    assert (world.hosts, world.slots, world.cross_rank, world.cross_size) == (("here",), (3,), 0, 1)


def test_one_rank_needs_no_rendezvous() -> None:
    one = {name: "1" if name.endswith("SIZE") else "0" for name in OPENMPI if "WORLD" in name}
    assert detect_world(one).rendezvous == "none"


def test_horovod_rank_without_address_on_one_host_is_bootstrapped() -> None:
    environ = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1",
               "HOROVOD_LOCAL_SIZE": "2"}
    world = detect_world(environ, hostname="here")
    assert (world.rendezvous, world.hosts, world.slots) == ("bootstrap", ("here",), (2,))


@pytest.mark.parametrize("environ", [
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"},
    {"SLURM_JOB_ID": "7"},
    {"TF_CONFIG": ""},
    {"TF_CONFIG": "{}"},
    {"TF_CONFIG": '{"cluster": {}, "task": {"type": "worker", "index": 0}}'},
    {"HOROVOD_CYCLE_TIME": "1", "HOROVOD_FUSION_THRESHOLD": "0"},
    {"OMPI_MCA_mpi_yield_when_idle": "1"},
])
def test_settings_that_are_no_rank_leave_a_single_process(environ: dict[str, str]) -> None:
    assert detect_world(environ).starter == "single"


@pytest.mark.parametrize(("environ", "missing"), [
    (without(HOROVODRUN, "HOROVOD_RANK"), "HOROVOD_RANK"),
    (without(HOROVODRUN, "HOROVOD_SIZE"), "HOROVOD_SIZE"),
    (without(HOROVODRUN, "HOROVOD_LOCAL_SIZE"), "HOROVOD_LOCAL_SIZE"),
    (without(HOROVODRUN, "HOROVOD_CROSS_SIZE"), "HOROVOD_CROSS_SIZE"),
    (without(HOROVODRUN, "HOROVOD_GLOO_RENDEZVOUS_ADDR"), "HOROVOD_GLOO_RENDEZVOUS_ADDR"),
    (without(OPENMPI, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_RANK"),
    (without(OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK"), "OMPI_COMM_WORLD_LOCAL_RANK"),
    (without(HYDRA, "PMI_RANK"), "PMI_RANK"),
    (without(HYDRA, "MPI_LOCALNRANKS"), "MPI_LOCALNRANKS"),
    (without(SLURM, "SLURM_PROCID"), "SLURM_PROCID"),
    (without(SLURM, "SLURM_NODEID"), "SLURM_NODEID"),
    (without(SLURM, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_STEP_TASKS_PER_NODE"),
    (without(HYDRA, "MPI_LOCALRANKID"), "MPI_LOCALRANKID"),
    ({"PMIX_RANK": "1"}, "OMPI_COMM_WORLD_RANK"),
])
def test_an_incomplete_set_is_an_error_that_names_what_is_missing(
        environ: dict[str, str], missing: str) -> None:
    with pytest.raises(WorldError, match=missing):
        detect_world(environ)


@pytest.mark.parametrize(("environ", "found"), [
    (without(HYDRA, "MPI_LOCALNRANKS"), "PMI_RANK=2, PMI_SIZE=3, MPI_LOCALRANKID=0 set, but not"),
    ({"SLURM_STEP_ID": "0"}, "SLURM_STEP_ID set, but not SLURM_PROCID, SLURM_NTASKS"),
    (HOROVODRUN | {"HOROVOD_RANK": "3"}, "rank 3 of 3"),
    (HOROVODRUN | {"HOROVOD_RANK": "-1"}, "rank -1 of 3"),
    (HOROVODRUN | {"HOROVOD_LOCAL_RANK": "1"}, "local rank 1 of 1"),
    (HOROVODRUN | {"HOROVOD_CROSS_RANK": "2"}, "cross rank 2 of 2"),
    (HOROVODRUN | {"HOROVOD_LOCAL_SIZE": "4"}, "4 ranks on this host of 3"),
    (HOROVODRUN | {"HOROVOD_SIZE": "many"}, "HOROVOD_SIZE is 'many'"),
    (OPENMPI | {"OMPI_COMM_WORLD_SIZE": "2"}, "rank 2 of 2"),
    (HYDRA | {"PMI_SIZE": ""}, "PMI_SIZE is ''"),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "4"}, "does not add up"),
    (SLURM | {"SLURM_NODEID": "2"}, "SLURM_NODEID=2"),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "task counts"),
    ({"TF_CONFIG": "{"}, "TF_CONFIG cannot be read"),
    ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "TF_CONFIG cannot be read"),
    ({"TF_CONFIG": "[1]"}, "TF_CONFIG cannot be read"),
    ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}'},
     "'worker' with index 1, which is not in its cluster of worker 0"),
])
def test_contradictions_are_errors_that_show_the_values(environ: dict[str, str],
                                                        found: str) -> None:
    with pytest.raises(WorldError) as caught:
        detect_world(environ)
    assert found in str(caught.value)


@pytest.mark.parametrize("kind", ["ps", "evaluator"])
def test_tf_config_roles_without_a_part_are_refused_with_the_reason(kind: str) -> None:
    config = {"cluster": {"worker": ["a:1", "b:1"], kind: ["c:1"]},
              "task": {"type": kind, "index": 0}}
    with pytest.raises(WorldError, match=f"{kind}.*no part in allreduce"):
        detect_world({"TF_CONFIG": json.dumps(config)})


@pytest.mark.parametrize("environ", [
    BATCH,
    without(BATCH, "SLURM_PROCID"),
    BATCH | {"SLURM_STEP_ID": "4294967290"},
    BATCH | {"SLURM_STEP_ID": "4294967280"},
], ids=["batch script", "salloc", "interactive step", "first special step"])
def test_a_slurm_allocation_without_srun_is_not_one_process(environ: dict[str, str]) -> None:
    with pytest.raises(WorldError, match=r"SLURM_NTASKS is 4.*Start it with: srun hvdtrain fit"):
        detect_world(environ)


def test_a_rank_of_our_launcher_in_a_batch_script_is_a_rank() -> None:
    assert detect_world(BATCH | HOROVODRUN).rank == 2


def test_explain_shows_every_fact_and_every_variable() -> None:
    assert explain(detect_world(SLURM)) == """\
rank:        2 of 3
local rank:  0 of 1
cross rank:  1 of 2
host:        hostb
hosts:       hosta:2, hostb:1
starter:     slurm: SLURM_STEP_ID is set: this is a task of a Slurm step
rendezvous:  bootstrap: nobody prepared one, hvdtrain does it
read:        SLURM_JOB_ID=7
read:        SLURM_STEP_ID=0
read:        SLURM_PROCID=2
read:        SLURM_STEP_NUM_TASKS=3
read:        SLURM_LOCALID=0
read:        SLURM_NODEID=1
read:        SLURM_STEP_TASKS_PER_NODE=2,1
read:        SLURM_STEP_NODELIST=hosta,hostb
read:        SLURMD_NODENAME=hostb"""


def test_explain_says_what_the_starter_does_not_tell() -> None:
    assert "hosts:       not told by the starter" in explain(detect_world(OPENMPI))


LAUNCHED = HOROVODRUN | {
    "HVDTRAIN_STARTER": "native", "HVDTRAIN_HOSTS": "hosta:2,hostb:1",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.77.0.1:41235/0123456789abcdef0123456789abcdef"}


def test_our_launcher_tells_the_hosts_of_all_ranks() -> None:
    world = detect_world(LAUNCHED)
    assert (world.hosts, world.slots) == (("hosta", "hostb"), (2, 1))


@pytest.mark.parametrize("text", ["", "hosta:2", "hosta:2,hostb:x", "hosta", ":3"])
def test_hosts_that_do_not_fit_are_left_out(text: str) -> None:
    assert detect_world(LAUNCHED | {"HVDTRAIN_HOSTS": text}).hosts == ()


def test_what_is_printed_holds_no_capability() -> None:
    world = detect_world(LAUNCHED)
    assert world.evidence["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.77.0.1:41235"
    assert "0123456789abcdef" not in f"{world} {explain(world)}"
