"""GPUs and CUDA's libraries, cores and limits of one host."""

from __future__ import annotations

from hvdtrain.doctor.facts import UNLIMITED, GpuFacts
from hvdtrain.doctor.finding import Finding, failed, not_applicable, ok, warning
from hvdtrain.doctor.judge.view import HostView

_NCCL = "libnccl.so.2"
_WHEELS = {
    "libcudart": "nvidia-cuda-runtime", "libcublas": "nvidia-cublas",
    "libcublasLt": "nvidia-cublas", "libcufft": "nvidia-cufft", "libcusolver": "nvidia-cusolver",
    "libcusparse": "nvidia-cusparse", "libnvJitLink": "nvidia-nvjitlink",
    "libcupti": "nvidia-cuda-cupti", "libcudnn": "nvidia-cudnn", "libnccl": "nvidia-nccl"}
#: Major version of CUDA -> the oldest driver of Linux that runs it.
_DRIVERS = {12: (525, 60), 13: (580, 65)}
_SHM_MIB = 128
"""Docker gives 64 MiB, too little for NCCL and for Open MPI's shared memory."""
_FILES, _FILES_PER_RANK = 512, 8
_MIB = 1 << 20


def wheel_of(library: str, cuda: str) -> str:
    """The package that brings a library of CUDA."""
    name = _WHEELS[library.partition(".so")[0]]
    major = cuda.partition(".")[0]
    # From CUDA 13 on the toolkit's own wheels carry no suffix.
    bare = major == "13" and name not in ("nvidia-cudnn", "nvidia-nccl")
    return name if bare else f"{name}-cu{major}"


def judge_cuda(host: HostView) -> list[Finding]:
    """The libraries that TensorFlow opens on GPUs, and NCCL."""
    cuda, gpu = host.facts.cuda, host.facts.gpu
    if cuda is None and "cuda" in host.facts.problems:
        return []
    if cuda is None:
        why = ("TensorFlow is no CUDA build" if host.facts.python is not None
               and "tensorflow" in host.facts.python.packages else "there is no TensorFlow")
        return [not_applicable("cuda-libraries", host.name, why),
                not_applicable("nccl", host.name, why)]
    make = failed if gpu is not None and gpu.gpus else warning
    missing = [name for name, place in cuda.libraries.items() if not place and name != _NCCL]
    if missing:
        wheels = {name: wheel_of(name, cuda.version) for name in missing}
        named = ", ".join(f"{name} ({wheel})" for name, wheel in wheels.items())
        findings = [make("cuda-libraries", host.name, f"not found: {named}",
                         expected=f"the libraries of CUDA {cuda.version} that TensorFlow opens",
                         fix=f"pip install {' '.join(dict.fromkeys(wheels.values()))}")]
    else:
        findings = [ok("cuda-libraries", host.name,
                       f"all {len(cuda.libraries) - 1} of CUDA {cuda.version}, "
                       f"cuDNN {cuda.cudnn}")]
    if cuda.libraries.get(_NCCL, ""):
        return [*findings, ok("nccl", host.name, cuda.libraries[_NCCL])]
    return [*findings, make("nccl", host.name, f"{_NCCL} was not found",
                            expected="NCCL, which reduces between GPUs",
                            fix=f"pip install {wheel_of(_NCCL, cuda.version)}")]


def visible_gpus(gpu: GpuFacts) -> int:
    """The GPUs that a rank can see."""
    if gpu.visible is None:
        return len(gpu.gpus)
    wanted = [item.strip() for item in gpu.visible.split(",") if item.strip()]
    if "-1" in wanted:  # it ends the list
        wanted = wanted[:wanted.index("-1")]
    return min(len(wanted), len(gpu.gpus))


def judge_gpus(host: HostView) -> list[Finding]:
    """GPUs against TensorFlow's build, the driver and the ranks of the host."""
    gpu, cuda = host.facts.gpu, host.facts.cuda
    if gpu is None:
        return []
    if not gpu.gpus:
        return [_no_gpus(host, gpu)]
    found = _describe(gpu)
    if cuda is None:
        return [warning("gpus", host.name, f"{found}; TensorFlow is a CPU build",
                        expected="a TensorFlow that uses them",
                        fix="pip uninstall -y tensorflow-cpu && pip install 'hvdtrain[gpu]' && "
                            "hvdtrain build-horovod --gpu --install")]
    oldest = _DRIVERS.get(int(cuda.version.partition(".")[0] or 0))
    driver = gpu.gpus[0].driver
    if oldest and driver and _numbers(driver) < oldest:
        return [failed("gpus", host.name, f"{found}: the driver is older than CUDA "
                       f"{cuda.version}", expected=f"driver {oldest[0]}.{oldest[1]} or newer",
                       fix=f"apt-get install nvidia-driver-{oldest[0]}   (or your system's way)")]
    there = visible_gpus(gpu)
    if host.slots is not None and there and host.slots > there:
        return [failed("gpus", host.name, f"{found}; {host.slots} ranks are to run here",
                       expected="one GPU for each rank",
                       fix=f"hvdtrain launch -H {host.name}:{there} ...")]
    if gpu.problem:
        return [warning("gpus", host.name, f"{found}; {gpu.problem}",
                        expected="nvidia-smi answers", fix="nvidia-smi   (see what it says)")]
    return [ok("gpus", host.name, found)]


def _no_gpus(host: HostView, gpu: GpuFacts) -> Finding:
    if gpu.problem:
        make = failed if host.facts.cuda is not None else warning
        return make("gpus", host.name, f"nvidia-smi says: {gpu.problem}",
                    expected="nvidia-smi lists the GPUs",
                    fix="modprobe -r nvidia_uvm nvidia_drm nvidia_modeset nvidia && modprobe "
                        "nvidia   (or restart the host: driver and library must be one version)")
    if host.facts.cuda is not None:
        return warning("gpus", host.name, "none; TensorFlow is a CUDA build and will use the CPU",
                       expected="a GPU, or the smaller TensorFlow for CPUs",
                       fix="pip uninstall -y tensorflow && pip install 'hvdtrain[cpu]' && "
                           "hvdtrain build-horovod --install")
    return not_applicable("gpus", host.name, "none; TensorFlow is a CPU build")


def _describe(gpu: GpuFacts) -> str:
    kinds = dict.fromkeys(
        one.name + (f" {one.memory_mib} MiB" if one.memory_mib else "") for one in gpu.gpus)
    driver = f", driver {gpu.gpus[0].driver}" if gpu.gpus[0].driver else ""
    there = visible_gpus(gpu)
    hidden = (f", {there} visible by CUDA_VISIBLE_DEVICES={gpu.visible}"
              if there < len(gpu.gpus) else "")
    return f"{len(gpu.gpus)} x {' and '.join(kinds)}{driver}{hidden}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def judge_cores(host: HostView) -> list[Finding]:
    """Cores against ranks, and against the quota of the control group."""
    machine = host.facts.machine
    if machine is None:
        return []
    quota = machine.quota_cores
    usable = machine.cores if quota is None else min(machine.cores, max(1, int(quota)))
    found = f"{machine.cores}" + (f", of which the control group grants {quota:g}"
                                  if quota is not None else "")
    if host.slots is not None and host.slots > usable:
        return [warning("cores", host.name, f"{found}; {host.slots} ranks are to run here",
                        expected="a core for each rank",
                        fix=f"hvdtrain launch -H {host.name}:{usable} ...")]
    if usable < machine.cores:
        last = f"0-{usable - 1}" if usable > 1 else "0"
        return [warning("cores", host.name, f"{found}: as many threads as cores would be started",
                        expected="no more cores visible than granted",
                        fix=f"taskset -c {last} hvdtrain ...")]
    return [ok("cores", host.name, found)]


def judge_limits(host: HostView) -> list[Finding]:
    """Shared memory, open files, locked memory."""
    machine = host.facts.machine
    if machine is None:
        return []
    return [_judge_shm(host.name, machine.shm_bytes // _MIB, machine.shm_free_bytes // _MIB),
            _judge_files(host, machine.open_files, machine.open_files_hard),
            _judge_memlock(host.name, machine.memlock_bytes, machine.infiniband)]


def _judge_shm(host: str, size_mib: int, free_mib: int) -> Finding:
    found = f"{free_mib} of {size_mib} MiB free"
    if free_mib >= _SHM_MIB:
        return ok("shared-memory", host, found)
    fix = ("mount -o remount,size=8G /dev/shm   (in Docker: --shm-size=8g; in Kubernetes: an "
           "emptyDir of medium Memory)" if size_mib < 2 * _SHM_MIB else
           "ls -la /dev/shm   (and remove what ended programs have left there)")
    return warning("shared-memory", host, found, fix=fix,
                   expected=f"{_SHM_MIB} MiB for NCCL and MPI between ranks of a host")


def _judge_files(host: HostView, soft: int, hard: int) -> Finding:
    if soft == UNLIMITED:
        return ok("open-files", host.name, "unlimited")
    wanted = _FILES + _FILES_PER_RANK * (host.slots or 1)
    if soft >= wanted:
        return ok("open-files", host.name, str(soft))
    fix = (f"ulimit -n {hard if hard != UNLIMITED else 65536}" if hard == UNLIMITED
           or hard >= wanted else "echo '* - nofile 65536' >> /etc/security/limits.conf   (then "
                                  "log in anew)")
    return warning("open-files", host.name, f"{soft} (ulimit -n)", expected=f"{wanted} or more",
                   fix=fix)


def _judge_memlock(host: str, memlock: int, infiniband: tuple[str, ...]) -> Finding:
    if not infiniband:
        return not_applicable("locked-memory", host, "no InfiniBand")
    named = ", ".join(infiniband)
    if memlock == UNLIMITED:
        return ok("locked-memory", host, f"unlimited, for {named}")
    return warning("locked-memory", host, f"{memlock // 1024} KiB (ulimit -l), with {named}",
                   expected="unlimited: InfiniBand pins the memory that it sends",
                   fix="echo '* - memlock unlimited' >> /etc/security/limits.conf   (then log in "
                       "anew)")


DEVICES = (judge_gpus, judge_cuda, judge_cores, judge_limits)
