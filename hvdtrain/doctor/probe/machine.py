"""Cores, limits and GPUs of this host, as a rank started here gets them."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.doctor.facts import UNLIMITED, Gpu, GpuFacts, MachineFacts
from hvdtrain.doctor.probe.command import ask

_SMI_LIMIT_S = 15.0
_SMI = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_DRIVER = Path("/proc/driver/nvidia")


def look_at_machine() -> MachineFacts:
    """Cores, /dev/shm and limits."""
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None  # noqa: S108
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    verbs = Path("/sys/class/infiniband")
    return MachineFacts(
        cores=len(os.sched_getaffinity(0)), quota_cores=quota_cores(Path("/")),
        shm_bytes=shm.f_frsize * shm.f_blocks if shm else 0,
        shm_free_bytes=shm.f_frsize * shm.f_bavail if shm else 0,
        open_files=_limit(soft), open_files_hard=_limit(hard), memlock_bytes=_limit(memlock),
        infiniband=tuple(sorted(os.listdir(verbs))) if verbs.is_dir() else ())


def _limit(value: int) -> int:
    return UNLIMITED if value == resource.RLIM_INFINITY else value


def quota_cores(root: Path) -> float | None:
    """The cores that the control groups above this process grant, of both versions.

    Args:
        root: Where `proc` and `sys` are.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        for folder in (Path(place), *Path(place).parents):
            below = str(folder).lstrip("/")
            if not controllers:
                quotas += _quota_v2(root / "sys/fs/cgroup" / below)
            elif "cpu" in controllers.split(","):
                for mount in {"cpu", controllers}:
                    quotas += _quota_v1(root / "sys/fs/cgroup" / mount / below)
    return min(quotas, default=None)


def _quota_v2(folder: Path) -> list[float]:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return []
    return [] if quota == "max" else [int(quota) / int(period)]


def _quota_v1(folder: Path) -> list[float]:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return []
    return [quota / period] if quota > 0 and period > 0 else []


def look_at_gpus(environ: Mapping[str, str]) -> GpuFacts:
    """The GPUs by `nvidia-smi`, else by what the driver tells in /proc."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None:
        gpus = from_proc(_DRIVER)
        problem = "nvidia-smi is not on PATH" if gpus else ""
        return GpuFacts(gpus=gpus, problem=problem, visible=visible)
    said = ask(["nvidia-smi", *_SMI], limit_s=_SMI_LIMIT_S)
    if said.code == 0:
        return GpuFacts(gpus=from_smi(said.out), visible=visible)
    none_there = "No devices were found" in said.out + said.err
    return GpuFacts(gpus=from_proc(_DRIVER), visible=visible,
                    problem="" if none_there else said.last_line)


def from_smi(text: str) -> tuple[Gpu, ...]:
    """The GPUs in what nvidia-smi prints: `name, memory in MiB, driver` for each."""
    gpus = []
    for line in text.splitlines():
        name, _, rest = line.partition(",")
        memory, _, driver = rest.partition(",")
        if driver.strip():
            mib = memory.strip()
            gpus.append(Gpu(name=name.strip(), driver=driver.strip(),
                            memory_mib=int(mib) if mib.isdecimal() else None))
    return tuple(gpus)


def from_proc(driver: Path) -> tuple[Gpu, ...]:
    """The GPUs in the driver's own files."""
    gpus = []
    for file in sorted(driver.glob("gpus/*/information")):
        model = next((line.partition(":")[2].strip()
                      for line in file.read_text(errors="replace").splitlines()
                      if line.startswith("Model:")), "unknown")
        gpus.append(Gpu(name=model, driver=_driver_version(driver / "version")))
    return tuple(gpus)


def _driver_version(file: Path) -> str:
    """The version in a line such as `NVRM version: NVIDIA UNIX x86_64 Kernel Module 550.54 ...`."""
    try:
        words = file.read_text(errors="replace").partition("Kernel Module")[2].split()
    except OSError:
        return ""
    return next((word for word in words if word[0].isdigit()), "")
