"""Hosts with made-up facts: healthy, and each thing changed as a test wants it."""

from dataclasses import replace

from hvdtrain.doctor.facts import (
    CudaFacts,
    DirectoryFacts,
    Gpu,
    GpuFacts,
    LoadFacts,
    MachineFacts,
    MpiFacts,
    NetworkFacts,
    ProbeFacts,
    PythonFacts,
    SlurmFacts,
)
from hvdtrain.doctor.findings import HostView
from hvdtrain.horovod_check import HorovodCheck
from hvdtrain.launch.facts import Mpirun

PYTHON = PythonFacts(
    version="3.12.4", executable="/opt/venv/bin/python", hvdtrain_hash="abc", hvdtrain_at="/opt/h",
    packages={"hvdtrain": "0.1.0", "tensorflow": "2.21.0", "keras": "3.15.1",
              "horovod": "0.28.1+tf2.21.0"})
HOROVOD = HorovodCheck(
    installed=True, version="0.28.1+tf2.21.0", tensorflow_built_for="2.21.0",
    tensorflow_installed="2.21.0", mpi_kind="openmpi", gloo=True)
MPI = MpiFacts(mpirun=Mpirun(path="/opt/venv/bin/mpirun", flavour="openmpi", version="5.0.11"),
               mpi4py=LoadFacts(loads=True, detail="Open MPI v5.0.11"))
MACHINE = MachineFacts(cores=8, shm_bytes=8 << 30, shm_free_bytes=7 << 30, open_files=65536,
                       open_files_hard=65536)
H100 = Gpu(name="NVIDIA H100 80GB HBM3", memory_mib=81559, driver="550.54.15")
CUDA = CudaFacts(version="12.5.1", cudnn="9", libraries={
    "libcudart.so.12": "/opt/a", "libcublas.so.12": "/opt/b", "libcublasLt.so.12": "/opt/b",
    "libcudnn.so.9": "/opt/c", "libnccl.so.2": "/opt/d"})
SLURM = SlurmFacts(version="slurm-wlm 22.05.8", mpi_types=("none", "pmi2", "pmix"),
                   pmix_plugin="/usr/lib/mpi_pmix.so", pmix_library="/usr/lib/libpmix.so",
                   pmix_loads=True)
NETWORK = NetworkFacts(interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1"}, own_address="10.0.0.1",
                       ssh_client=None, ssh_server=None, port=40000)
FACTS = ProbeFacts(
    python=PYTHON, horovod=HOROVOD, mpi=MPI, gpu=GpuFacts(), machine=MACHINE,
    horovod_load=LoadFacts(loads=True), tensorflow_load=LoadFacts(loads=True), network=NETWORK,
    directory=DirectoryFacts(path="/job", code_hash="c", code_files=1))


def host(name="hosta", *, slots=None, is_local=True, noise=(), offset_s=0.0, error_s=0.001,
         **changes):
    """A host whose facts are healthy but for `changes`.

    A change is a whole part, or a dictionary with some of its values.
    """
    parts = {key: replace(getattr(FACTS, key), **value)
             if isinstance(value, dict) and key != "problems" else value
             for key, value in changes.items()}
    return HostView(name=name, slots=slots, is_local=is_local, noise=tuple(noise),
                    clock_offset_s=offset_s, clock_error_s=error_s, answer_s=0.4,
                    facts=replace(FACTS, **parts))


def with_packages(**versions):
    """Python facts with other versions; None: not installed."""
    packages = {name: version for name, version in (PYTHON.packages | versions).items() if version}
    return replace(PYTHON, packages=packages)
