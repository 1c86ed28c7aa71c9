"""Facts of a made-up machine, for plans that do not depend on this one."""

from hvdtrain.launch.facts import LaunchFacts, Mpirun

OPENMPI_5 = Mpirun(path="/opt/venv/bin/mpirun", flavour="openmpi", version="5.0.11")
OPENMPI_4 = Mpirun(path="/usr/bin/mpirun", flavour="openmpi", version="4.1.4")
MPICH = Mpirun(path="/opt/mpich/bin/mpirun", flavour="mpich", version="5.0.2")


def facts(**changes: object) -> LaunchFacts:
    values: dict[str, object] = {
        "horovod_ok": True, "horovod_gloo": True, "horovod_mpi_kind": "openmpi",
        "mpirun": OPENMPI_5, "cores": 8, "is_root": False,
        "scripts_dir": "/opt/venv/bin", "hostname": "hosta"}
    return LaunchFacts(**(values | changes))  # type: ignore[arg-type]
