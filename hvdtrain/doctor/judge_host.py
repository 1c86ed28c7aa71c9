"""From facts to findings of each host alone: software, GPUs, cores, limits, Slurm. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from hvdtrain.doctor import facts
from hvdtrain.doctor.findings import Finding, HostView, failed, not_applicable, ok, warning
from hvdtrain.horovod_check import FIX, HorovodCheck

SUPPORTED = {"tensorflow": ">=2.16,<2.22", "keras": ">=3.7,<3.16"}
"""As in pyproject.toml; a test compares them."""
_GET_TENSORFLOW = "pip install 'hvdtrain[cpu]'   (with GPUs: 'hvdtrain[gpu]')"
_BUILD_HOROVOD = FIX.removeprefix("run: ")
_NCCL = "libnccl.so.2"
_WHEELS = {
    "libcudart": "nvidia-cuda-runtime", "libcublas": "nvidia-cublas",
    "libcublasLt": "nvidia-cublas", "libcufft": "nvidia-cufft", "libcusolver": "nvidia-cusolver",
    "libcusparse": "nvidia-cusparse", "libnvJitLink": "nvidia-nvjitlink",
    "libcupti": "nvidia-cuda-cupti", "libcudnn": "nvidia-cudnn", "libnccl": "nvidia-nccl"}
#: Major version of CUDA -> the oldest driver of Linux that runs it.
_DRIVERS = {12: "525.60", 13: "580.65"}
_SHM_MIB = 128  # Docker's 64 MiB are too few for NCCL and Open MPI
_FILES, _FILES_PER_RANK = 512, 8
_NO_CLUSTER = "configuration source"  # Slurm is installed, but the host is in no cluster


def judge_host(host: HostView) -> Iterator[Finding]:
    """All findings that need no other host."""
    seen, name = host.facts, host.name
    if seen.python is not None:
        yield from _judge_python(name, seen.python)
    if seen.tensorflow_load is not None:
        yield _judge_load("tensorflow-loads", name, seen.tensorflow_load,
                          expected="its library loads",
                          fix="pip install --force-reinstall --no-deps tensorflow-cpu   (SIGILL: "
                              "this processor lacks AVX, and needs a TensorFlow built for it)")
    if seen.horovod is not None:
        yield from _judge_horovod(name, seen.horovod, seen.mpi)
        if seen.horovod_load is not None:
            yield _judge_load("horovod-loads", name, seen.horovod_load,
                              expected="its library loads beside TensorFlow",
                              fix=f"{_BUILD_HOROVOD} --force")
    if seen.mpi is not None:
        yield from _judge_mpi(name, seen.mpi, seen.horovod)
    if seen.gpu is not None:
        yield _judge_gpus(host, seen.gpu, seen.cuda)
    if "cuda" not in seen.problems:
        yield from _judge_cuda(host, seen.cuda)
    if seen.machine is not None:
        yield from (judge(host, seen.machine) for judge in (
            _judge_cores, _judge_shm, _judge_files, _judge_memlock))
    if "slurm" not in seen.problems:
        yield from _judge_slurm(name, seen.slurm)
    for part, problem in seen.problems.items():
        yield warning("probe", name, f"{part} could not be looked at: {problem}",
                      expected="an answer", fix="hvdtrain doctor --json   (if it stays so, it is a "
                                                "bug of the doctor; report it with this output)")


def _judge_python(host: str, python: facts.PythonFacts) -> Iterator[Finding]:
    packages = python.packages
    yield ok("python", host, f"{python.version}, {python.executable}")
    yield ok("hvdtrain", host, f"{packages.get('hvdtrain', 'without metadata')}, "
                               f"{python.hvdtrain_at}, source {python.hvdtrain_hash}")
    for name, wanted in SUPPORTED.items():
        found = packages.get(name, "not installed")
        fix = (_GET_TENSORFLOW if name not in packages else
               f"{_GET_TENSORFLOW}, then: {_BUILD_HOROVOD}" if name == "tensorflow" else
               f"pip install '{name}{wanted}'")
        yield (ok(name, host, found) if _fits(found, wanted) else
               failed(name, host, found, expected=wanted, fix=fix))
    backend, source = python.keras_backend, python.keras_backend_from
    if backend in (None, "tensorflow"):
        yield ok("keras-backend", host,
                 f"tensorflow, by {source}" if backend else "tensorflow, its default")
    else:
        yield failed("keras-backend", host, f"{backend}, by {source}", expected="tensorflow", fix=(
            "export KERAS_BACKEND=tensorflow" if source == "KERAS_BACKEND" else
            f"sed -i 's/\"backend\": *\"{backend}\"/\"backend\": \"tensorflow\"/' {source}"))


def _fits(version: str, wanted: str) -> bool:
    try:
        return SpecifierSet(wanted, prereleases=True).contains(Version(version))
    except InvalidVersion:
        return False


def _judge_load(check: str, host: str, load: facts.LoadFacts, **repair: str) -> Finding:
    if load.loads:
        return ok(check, host, "its library loads")
    return failed(check, host, load.detail, **repair)


def _judge_horovod(host: str, check: HorovodCheck, mpi: facts.MpiFacts | None) -> Iterator[Finding]:
    # mpi4py can replace it if there is an mpirun.
    has_mpi4py = mpi and mpi.mpirun and mpi.mpi4py and mpi.mpi4py.loads
    for text in (*check.problems, *check.warnings):
        found, is_fixed, fix = text.rpartition("run: ")  # most texts end so
        found = (found or text).rstrip().removesuffix("then").rstrip().rstrip(";,")
        if not check.ok and has_mpi4py:
            found += " (mpi4py would be used)"
        make = failed if text in check.problems and not has_mpi4py else warning
        yield make("horovod", host, found, expected="Horovod built for what is installed",
                   fix=fix if is_fixed else _BUILD_HOROVOD)
    if not check.problems and not check.warnings:
        parts = filter(None, (check.gloo and "Gloo", check.mpi_kind, check.nccl and "NCCL"))
        yield ok("horovod", host, f"{(check.version or '').partition('+')[0]} for TensorFlow "
                 f"{check.tensorflow_built_for}, with {', '.join(map(str, parts))}")


def _judge_mpi(host: str, mpi: facts.MpiFacts, check: HorovodCheck | None) -> Iterator[Finding]:
    kind = check.mpi_kind if check is not None and check.ok else None
    mpirun = mpi.mpirun
    if mpirun is None:
        yield not_applicable("mpi", host, "no mpirun; Gloo needs none")
    elif kind is not None and kind != mpirun.flavour:
        yield warning(
            "mpi", host,
            f"mpirun is {mpirun.flavour} {mpirun.version} ({mpirun.path}), but Horovod was "
            f"built with {kind}: under it each rank would train alone",
            expected=f"the mpirun of {kind}, or Gloo (hvdtrain launch takes it by itself)",
            fix=f"pip install {kind}   (or: hvdtrain build-horovod --mpi auto --install --force)")
    else:
        yield ok("mpi", host, f"{mpirun.flavour} {mpirun.version}, {mpirun.path}")
    if mpi.mpi4py is None:
        yield not_applicable("mpi4py", host, "not installed; Horovod needs none")
    elif mpi.mpi4py.loads:
        yield ok("mpi4py", host, f"with {mpi.mpi4py.detail}")
    else:
        yield warning("mpi4py", host, mpi.mpi4py.detail, expected="`from mpi4py import MPI` works",
                      fix="pip install --force-reinstall 'hvdtrain[mpi]'")


def _judge_gpus(host: HostView, gpu: facts.GpuFacts, cuda: facts.CudaFacts | None) -> Finding:
    if not gpu.gpus:
        return _no_gpus(host.name, gpu, is_cuda=cuda is not None)
    found, driver, visible = _describe(gpu), gpu.gpus[0].driver, gpu.count_visible()
    if cuda is None:
        return warning("gpus", host.name, f"{found}; TensorFlow is a CPU build",
                       expected="a TensorFlow that uses them",
                       fix="pip uninstall -y tensorflow-cpu && pip install 'hvdtrain[gpu]' && "
                           "hvdtrain build-horovod --gpu --install")
    oldest = _DRIVERS.get(int(cuda.version.partition(".")[0] or 0))
    if oldest and driver and not _fits(driver, f">={oldest}"):
        return failed("gpus", host.name, f"{found}: the driver is older than CUDA {cuda.version}",
                      expected=f"driver {oldest} or newer",
                      fix=f"apt-get install nvidia-driver-{oldest.partition('.')[0]}   (or your "
                          "system's way)")
    if host.slots is not None and 0 < visible < host.slots:
        return failed("gpus", host.name, f"{found}; {host.slots} ranks are to run here",
                      expected="one GPU for each rank",
                      fix=f"hvdtrain launch -H {host.name}:{visible} ...")
    if gpu.problem:
        return warning("gpus", host.name, f"{found}; {gpu.problem}",
                       expected="nvidia-smi answers", fix="nvidia-smi   (see what it says)")
    return ok("gpus", host.name, found)


def _no_gpus(host: str, gpu: facts.GpuFacts, *, is_cuda: bool) -> Finding:
    if gpu.problem:
        make = failed if is_cuda else warning
        return make("gpus", host, f"nvidia-smi says: {gpu.problem}",
                    expected="nvidia-smi lists the GPUs",
                    fix="modprobe -r nvidia_uvm nvidia_drm nvidia_modeset nvidia && modprobe "
                        "nvidia   (or restart the host: driver and library must be one version)")
    if is_cuda:
        return warning("gpus", host, "none; TensorFlow is a CUDA build and will use the CPU",
                       expected="a GPU, or the smaller TensorFlow for CPUs",
                       fix="pip uninstall -y tensorflow && pip install 'hvdtrain[cpu]' && "
                           f"{_BUILD_HOROVOD}")
    return not_applicable("gpus", host, "none; TensorFlow is a CPU build")


def _describe(gpu: facts.GpuFacts) -> str:
    kinds = dict.fromkeys(
        one.name + (f" {one.memory_mib} MiB" if one.memory_mib else "") for one in gpu.gpus)
    driver = f", driver {gpu.gpus[0].driver}" if gpu.gpus[0].driver else ""
    visible = gpu.count_visible()
    hidden = (f", {visible} visible by CUDA_VISIBLE_DEVICES={gpu.visible}"
              if visible < len(gpu.gpus) else "")
    return f"{len(gpu.gpus)} x {' and '.join(kinds)}{driver}{hidden}"


def _judge_cuda(host: HostView, cuda: facts.CudaFacts | None) -> Iterator[Finding]:
    python, gpu = host.facts.python, host.facts.gpu
    if cuda is None:
        why = ("TensorFlow is no CUDA build" if python is not None
               and "tensorflow" in python.packages else "there is no TensorFlow")
        for check in ("cuda-libraries", "nccl"):
            yield not_applicable(check, host.name, why)
        return
    make = failed if gpu is not None and gpu.gpus else warning
    wheels = {name: wheel_of(name, cuda.version)
              for name, place in cuda.libraries.items() if not place and name != _NCCL}
    if wheels:
        named = ", ".join(f"{name} ({wheel})" for name, wheel in wheels.items())
        yield make("cuda-libraries", host.name, f"not found: {named}",
                   expected=f"the libraries of CUDA {cuda.version} that TensorFlow opens",
                   fix=f"pip install {' '.join(dict.fromkeys(wheels.values()))}")
    else:
        yield ok("cuda-libraries", host.name,
                 f"all {len(cuda.libraries) - 1} of CUDA {cuda.version}, cuDNN {cuda.cudnn}")
    if place := cuda.libraries.get(_NCCL):
        yield ok("nccl", host.name, place)
    else:
        yield make("nccl", host.name, f"{_NCCL} was not found",
                   expected="NCCL, which reduces between GPUs",
                   fix=f"pip install {wheel_of(_NCCL, cuda.version)}")


def wheel_of(library: str, cuda: str) -> str:
    """The package with a CUDA library."""
    name = _WHEELS[library.partition(".so")[0]]
    major = cuda.partition(".")[0]
    # From CUDA 13 on the toolkit's own wheels carry no suffix.
    bare = major == "13" and name not in ("nvidia-cudnn", "nvidia-nccl")
    return name if bare else f"{name}-cu{major}"


def _judge_cores(host: HostView, machine: facts.MachineFacts) -> Finding:
    cores, quota = machine.cores, machine.quota_cores
    usable = cores if quota is None else min(cores, max(1, int(quota)))
    found = f"{cores}" if quota is None else f"{cores}, of which the control group grants {quota:g}"
    if host.slots is not None and host.slots > usable:
        return warning("cores", host.name, f"{found}; {host.slots} ranks are to run here",
                       expected="a core for each rank",
                       fix=f"hvdtrain launch -H {host.name}:{usable} ...")
    if usable < cores:
        last = f"0-{usable - 1}" if usable > 1 else "0"
        return warning("cores", host.name, f"{found}: as many threads as cores would be started",
                       expected="no more cores visible than granted",
                       fix=f"taskset -c {last} hvdtrain ...")
    return ok("cores", host.name, found)


def _judge_shm(host: HostView, machine: facts.MachineFacts) -> Finding:
    size_mib, free_mib = machine.shm_bytes >> 20, machine.shm_free_bytes >> 20
    found = f"{free_mib} of {size_mib} MiB free"
    if free_mib >= _SHM_MIB:
        return ok("shared-memory", host.name, found)
    fix = ("mount -o remount,size=8G /dev/shm   (in Docker: --shm-size=8g; in Kubernetes: an "
           "emptyDir of medium Memory)" if size_mib < 2 * _SHM_MIB else
           "ls -la /dev/shm   (and remove what ended programs have left there)")
    return warning("shared-memory", host.name, found, fix=fix,
                   expected=f"{_SHM_MIB} MiB for NCCL and MPI between ranks of a host")


def _judge_files(host: HostView, machine: facts.MachineFacts) -> Finding:
    soft, hard = machine.open_files, machine.open_files_hard
    wanted = _FILES + _FILES_PER_RANK * (host.slots or 1)
    if soft == facts.UNLIMITED or soft >= wanted:
        return ok("open-files", host.name, "unlimited" if soft == facts.UNLIMITED else str(soft))
    fix = "echo '* - nofile 65536' >> /etc/security/limits.conf   (then log in anew)"
    if hard == facts.UNLIMITED or hard >= wanted:
        fix = f"ulimit -n {65536 if hard == facts.UNLIMITED else hard}"
    return warning("open-files", host.name, f"{soft} (ulimit -n)", expected=f"{wanted} or more",
                   fix=fix)


def _judge_memlock(host: HostView, machine: facts.MachineFacts) -> Finding:
    if not machine.infiniband:
        return not_applicable("locked-memory", host.name, "no InfiniBand")
    named = ", ".join(machine.infiniband)
    if machine.memlock_bytes == facts.UNLIMITED:
        return ok("locked-memory", host.name, f"unlimited, for {named}")
    return warning("locked-memory", host.name,
                   f"{machine.memlock_bytes // 1024} KiB (ulimit -l), with {named}",
                   expected="unlimited: InfiniBand pins the memory that it sends",
                   fix="echo '* - memlock unlimited' >> /etc/security/limits.conf   (then log in "
                       "anew)")


def _judge_slurm(host: str, slurm: facts.SlurmFacts | None) -> Iterator[Finding]:
    if slurm is None or _NO_CLUSTER in slurm.problem and not slurm.job_id:
        why = ("no srun on PATH" if slurm is None else
               "Slurm's programs are here, but no cluster is set up")
        yield not_applicable("slurm", host, why)
        yield not_applicable("pmix", host, why)
        return
    if slurm.problem:
        yield warning("slurm", host, slurm.problem, expected="Slurm answers",
                      fix="scontrol ping   (and see `systemctl status slurmctld` on its host)")
    else:
        where = f"inside of job {slurm.job_id}" if slurm.job_id else "not inside of a job"
        step = ", in a step" if slurm.job_id and slurm.in_step else ""
        yield ok("slurm", host, f"{slurm.version}, {where}{step}; srun --mpi has "
                                f"{', '.join(slurm.mpi_types) or 'nothing'}")
    if not slurm.pmix_plugin:
        yield not_applicable("pmix", host, "Slurm has no PMIx plugin; `srun --mpi=none` with Gloo "
                                           "needs none")
    elif slurm.pmix_loads:
        yield ok("pmix", host, f"{slurm.pmix_plugin} finds {slurm.pmix_library}")
    else:
        yield warning("pmix", host, f"{slurm.pmix_plugin} wants {slurm.pmix_library}, which does "
                      "not load: srun --mpi=pmix fails", expected="PMIx's library at that place",
                      fix="apt-get install libpmix2 libpmix-dev   (then restart slurmd; Gloo with "
                          "--mpi=none works without)")
