import pytest

from hvdtrain.collectives import choose, shared_memory
from hvdtrain.errors import CollectiveError, ConfigError
from hvdtrain.horovod_check import HorovodCheck
from hvdtrain.world import World


def world(size=2, starter="native", rendezvous="gloo", local_size=1):
    return World(rank=0, size=size, local_rank=0, local_size=local_size, host="hosta",
                 starter=starter, rendezvous=rendezvous)


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    monkeypatch.setattr(shared_memory, "_GPUS", ())


def horovod(**changes):
    values = dict(
        installed=True, version="0.28.1", tensorflow_built_for="2.21.0",
        tensorflow_installed="2.21.0", mpi_library="libmpi.so.40", mpi_kind="openmpi",
        gloo=True, nccl=False, problems=(), warnings=())
    return HorovodCheck(**{**values, **changes})


NO_HOROVOD = horovod(installed=False, mpi_kind=None, problems=("Horovod is not installed",))
MPI = {"starter": "openmpi", "rendezvous": "mpi"}


@pytest.mark.parametrize(("promised", "found", "name", "reason"), [
    (world(size=1, starter="single", rendezvous="none"), NO_HOROVOD, "single", "one rank"),
    (world(), horovod(), "horovod-gloo", "started by native"),
    (world(local_size=2), horovod(), "shared-memory", "on one host, without GPUs"),
    (world(local_size=2), NO_HOROVOD, "shared-memory", "on one host, without GPUs"),
    (world(local_size=2, **MPI), horovod(), "shared-memory", "on one host, without GPUs"),
    (world(65, local_size=65), horovod(), "horovod-gloo", "started by native"),
    (world(starter="slurm", rendezvous="bootstrap"), horovod(), "horovod-gloo", "slurm"),
    (world(**MPI), horovod(), "horovod-mpi", "the MPI of Horovod"),
    (world(**MPI), NO_HOROVOD, "mpi4py", "not installed"),
    (world(starter="hydra", rendezvous="mpi"), horovod(), "mpi4py", "built with openmpi"),
])
def test_auto_chooses_with_a_reason(promised, found, name, reason):
    choice = choose("auto", promised, found)
    assert choice.name == name
    assert reason in choice.reason


@pytest.mark.parametrize(("asked", "promised", "found", "message"), [
    ("auto", world(), NO_HOROVOD, "Horovod cannot be used: Horovod is not installed"),
    ("single", world(), horovod(), "each would train alone"),
    ("mpi4py", world(), horovod(), "needs ranks that were started by an MPI"),
    ("horovod-mpi", world(), horovod(), "needs ranks that were started by an MPI"),
    ("horovod-mpi", world(**MPI), horovod(mpi_kind=None), "built without MPI"),
    ("horovod-gloo", world(**MPI), horovod(), "no Gloo rendezvous"),
    ("shared-memory", world(3, local_size=2), horovod(), "Started were 3, 2 of them on hosta"),
    ("shared-memory", world(65, local_size=65), horovod(), "at most 64"),
])
def test_what_cannot_work_is_refused(asked, promised, found, message):
    with pytest.raises(CollectiveError, match=message):
        choose(asked, promised, found)


def test_ranks_with_gpus_use_horovod_where_it_can_be_used(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "_GPUS", (tmp_path,))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert choose("auto", world(local_size=2), horovod()).name == "horovod-gloo"
    choice = choose("auto", world(local_size=2), NO_HOROVOD)
    assert (choice.name, choice.reason) == (
        "shared-memory", "all ranks are on one host; Horovod is not installed")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert choose("auto", world(local_size=2), horovod()).name == "shared-memory"


def test_auto_among_those_of_horovod():
    assert choose("auto", world(local_size=2), horovod(), among="horovod").name == "horovod-gloo"


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ConfigError, match="'nccl'. Expected one of: auto, shared-memory, horovod"):
        choose("nccl", world(), horovod())


def step(variable):
    return World(rank=0, size=2, local_rank=0, local_size=2, host="hosta", starter="slurm",
                 rendezvous="bootstrap", evidence={variable: "0"})


@pytest.mark.parametrize(("variable", "kind", "fits"), [
    ("PMIX_RANK", "openmpi", True), ("PMI_RANK", "mpich", True), ("PMI_RANK", "openmpi", False),
    ("PMIX_RANK", "mpich", False), ("SLURM_PROCID", "openmpi", False)])
def test_mpi_in_a_slurm_step_needs_the_plugin_of_its_kind(variable, kind, fits):
    if fits:
        assert choose("horovod-mpi", step(variable), horovod(mpi_kind=kind)).name == "horovod-mpi"
        return
    with pytest.raises(CollectiveError, match="needs ranks that were started by an MPI"):
        choose("horovod-mpi", step(variable), horovod(mpi_kind=kind))


def test_functions_of_horovod_take_only_horovod():
    assert choose("auto", world(local_size=2), horovod(), among="horovod").name == "horovod-gloo"
    assert choose("auto", world(**MPI), horovod(), among="horovod").name == "horovod-mpi"
    with pytest.raises(CollectiveError, match=r"collective of Horovod.*launch -np 2 -- python"):
        choose("auto", world(**MPI), horovod(mpi_kind=None), among="horovod")
