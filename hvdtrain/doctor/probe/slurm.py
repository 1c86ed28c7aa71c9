"""Slurm's client side on this host, and whether its PMIx plugin finds its library."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.doctor.facts import SlurmFacts
from hvdtrain.doctor.probe.command import ask

_LIMIT_S = 10.0
_PLUGIN_FOLDERS = ("/usr/lib/*/slurm-wlm", "/usr/lib64/slurm", "/usr/lib/slurm",
                   "/usr/lib/*/slurm", "/usr/local/lib/slurm", "/opt/slurm/lib/slurm")
_DLOPEN = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], mode=os.RTLD_LAZY)"


def look_at_slurm(environ: Mapping[str, str]) -> SlurmFacts | None:
    """Version, MPI plugins and the job around this process; None without Slurm."""
    srun = shutil.which("srun")
    if srun is None:
        return None
    version = ask([srun, "--version"], limit_s=_LIMIT_S)
    answer = ask(["scontrol", "ping"], limit_s=_LIMIT_S)
    listed = ask([srun, "--mpi=list"], limit_s=_LIMIT_S) if version.code == 0 else version
    plugin = pmix_plugin(srun)
    library = pmix_library(plugin.read_bytes()) if plugin else ""
    up = answer.code == 0 and " UP" in answer.out
    problem = "" if version.code == 0 and up else (
        version.last_line if version.code else answer.last_line)
    return SlurmFacts(
        version=version.out.strip() if version.code == 0 else "", problem=problem,
        mpi_types=mpi_types(listed.out + listed.err) if listed.code == 0 else (),
        pmix_plugin=str(plugin or ""), pmix_library=library, pmix_loads=_loads(library),
        job_id=environ.get("SLURM_JOB_ID", ""), in_step="SLURM_STEP_ID" in environ)


def mpi_types(text: str) -> tuple[str, ...]:
    """The plugins in what `srun --mpi=list` prints."""
    found: list[str] = []
    for line in text.partition("are...")[2].splitlines():
        name = line.removeprefix("srun:").strip()
        _, more, versions = name.partition(" available: ")
        found += versions.split(",") if more else [name]
    return tuple(name.strip() for name in found if name)


def pmix_plugin(srun: str) -> Path | None:
    """The plugin behind `--mpi=pmix`."""
    config = ask(["scontrol", "show", "config"], limit_s=_LIMIT_S)
    told = re.search(r"^PluginDir\s*=\s*(\S+)", config.out, flags=re.MULTILINE)
    beside = Path(srun).resolve().parents[1]
    folders = [Path(part) for part in told[1].split(":")] if told else []
    folders += [folder for pattern in _PLUGIN_FOLDERS
                for folder in Path("/").glob(pattern.lstrip("/"))]
    folders += [beside / "lib" / "slurm", beside / "lib64" / "slurm"]
    return next((folder / "mpi_pmix.so" for folder in folders
                 if (folder / "mpi_pmix.so").exists()), None)


def pmix_library(plugin: bytes) -> str:
    """The library that the plugin opens: its folder was set when Slurm was built."""
    name = "libpmix.so.2" if b"libpmix.so.2\0" in plugin else "libpmix.so"
    for found in re.finditer(rb"\0(/[\w.+/-]+/lib(?:64|/[\w-]+)?)\0", plugin):
        return f"{found[1].decode()}/{name}"
    return name


def _loads(library: str) -> bool:
    return library != "" and ask([sys.executable, "-I", "-S", "-c", _DLOPEN, library],
                                 limit_s=_LIMIT_S).code == 0
