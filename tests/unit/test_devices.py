import pytest

from hvdtrain.errors import DeviceError
from hvdtrain.train.devices import plan_devices
from hvdtrain.world import World


def world(local_rank, local_size, starter="native"):
    return World(rank=local_rank, size=local_size, local_rank=local_rank, local_size=local_size,
                 host="hosta", starter=starter, rendezvous="gloo")


def plan(local_rank=0, local_size=1, gpus=0, cores=8, starter="native", **environ):
    return plan_devices(world(local_rank, local_size, starter), visible_gpus=gpus, cores=cores,
                        environ=environ)


@pytest.mark.parametrize(("ranks", "cores", "starter_cores", "note", "threads"), [
    (4, 8, 0, "", 2),
    (4, 8, 8, "", 2),
    (2, 4, 8, "", 4),  # each of two ranks has half of the cores of its own
    (4, 8, 16, "", 4),  # bound to one of two packages, with another rank
    (1, 1, 8, "; bound to 1 of 8 cores: give mpirun --bind-to none", 1),
    (2, 1, 8, "; bound to 1 of 8 cores: give mpirun --bind-to none", 1),
    (2, 1, 2, "", 1),
    (4, 2, 0, "; 4 ranks share 2 cores, so they wait for each other", 1),
    (4, 2, 2, "; 4 ranks share 2 cores, so they wait for each other", 1),
    (2, 1, 1, "; 2 ranks share 1 core, so they wait for each other", 1),
    (8, 1, 8, "", 1),
])
def test_few_cores_for_a_rank_are_told(ranks, cores, starter_cores, note, threads):
    found = plan_devices(world(0, ranks, "openmpi"), visible_gpus=0, cores=cores, environ={},
                         starter_cores=starter_cores)
    assert str(found) == f"CPU, {threads} CPU thread{'s' if threads > 1 else ''}{note}"
    assert found.crowded == ("share" in note)


def test_cores_of_a_task_of_slurm_are_not_those_of_all_tasks():
    assert plan(0, 4, cores=1, starter="slurm", SLURM_CPUS_ON_NODE="4").note == ""
    assert plan(0, 2, cores=1, starter="slurm", SLURM_CPUS_ON_NODE="8").note == (
        "bound to 1 of 8 cores: give sbatch and srun --cpus-per-task")
    assert plan(0, 4, cores=2, starter="slurm").note.startswith("4 ranks share 2 cores")


def test_each_local_rank_gets_its_gpu():
    assert [plan(r, 4, gpus=4).gpu for r in range(4)] == [0, 1, 2, 3]


def test_a_host_may_have_more_gpus_than_ranks():
    assert [plan(r, 2, gpus=8).gpu for r in range(2)] == [0, 1]


def test_without_gpus_the_rank_runs_on_the_cpu():
    assert plan(gpus=0).gpu is None


def test_a_rank_that_sees_the_one_gpu_that_the_starter_chose_takes_index_0():
    assert plan(3, 4, gpus=1, CUDA_VISIBLE_DEVICES="3").gpu == 0


@pytest.mark.parametrize(("ranks", "gpus", "environ"), [
    (4, 2, {}), (4, 1, {}), (2, 1, {"CUDA_VISIBLE_DEVICES": ""}),
    (4, 2, {"CUDA_VISIBLE_DEVICES": "0,1"})])
def test_more_ranks_than_gpus_are_refused_naming_the_host(ranks, gpus, environ):
    with pytest.raises(DeviceError, match=f"Host hosta has {gpus} GPUs? for {ranks} ranks"):
        plan(ranks - 1, ranks, gpus=gpus, **environ)


def test_every_rank_of_a_crowded_host_refuses():
    for rank in range(3):
        with pytest.raises(DeviceError):
            plan(rank, 3, gpus=2)


@pytest.mark.parametrize(("ranks", "cores", "threads"), [
    (1, 8, 8), (2, 8, 4), (3, 8, 2), (8, 8, 1), (16, 8, 1)])
def test_threads_never_exceed_the_cores(ranks, cores, threads):
    found = plan(0, ranks, cores=cores).threads
    assert found == threads
    assert found * ranks <= max(cores, ranks)


def test_cores_that_slurm_gave_this_task_are_its_own():
    assert plan(0, 4, cores=6, SLURM_CPUS_PER_TASK="6").threads == 6
    # Without binding each task sees the cores of all.
    assert plan(0, 4, cores=8, starter="slurm", SLURM_CPUS_PER_TASK="1").threads == 1
    assert plan(0, 4, cores=8, starter="native", SLURM_CPUS_PER_TASK="6").threads == 2


@pytest.mark.parametrize(("size", "cores", "starting"), [(4, 1, 2), (4, 8, 8), (1, 1, 1)])
def test_one_core_of_several_hosts_has_two_threads_that_start_operations(size, cores, starting):
    """With one, reductions would come after all that computes."""
    place = World(rank=0, size=size, local_rank=0, local_size=1, host="hosta", starter="native",
                  rendezvous="gloo")
    assert plan_devices(place, visible_gpus=0, cores=cores, environ={}).starting == starting
