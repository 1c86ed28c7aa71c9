"""What a build gets: Horovod's source with its edits, private build tools, and the installation.

The edits are in `edits.toml`, each with a name and a reason. One that finds nothing to change
fails: the build stops on a source it was not written for.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.build_horovod.options import HOROVOD_VERSION
from hvdtrain.build_horovod.toolchain import Cuda, Target
from hvdtrain.errors import BuildError, MachineError
from hvdtrain.log import get_logger
from hvdtrain.process import run_program

SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
_RUNTIME_NEEDS = ("cloudpickle", "psutil", "pyyaml", "packaging")
_TOOL_NEEDS = ("setuptools>=77", "packaging>=23", "cmake>=3.25")
_SETUPTOOLS_WITH_WHEEL = (70, 1)  # builds wheels without the package `wheel`
_EDITS = Path(__file__).with_name("edits.toml")
_KERNELS_WITHOUT_NVCC = Path(__file__).with_name("nokernels.cc")
_KERNEL_FOLDER = "horovod/common/ops/cuda"


def get_sdist(cache: Path, given: Path | None, python: Path, env: dict[str, str]) -> Path:
    """The given source archive, else that of the cache, else through pip."""
    if given is not None:
        if not given.is_file():
            raise BuildError(f"The source archive {given} does not exist.")
        return given
    path = cache / SDIST_NAME
    if not path.is_file():
        get_logger().info("fetching the source of Horovod %s through pip", HOROVOD_VERSION)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            done = run_program(
                [*_find_pip(python, env), "download", "--quiet", "--no-deps", "--no-binary",
                 "horovod", f"horovod=={HOROVOD_VERSION}", "-d", folder], env=env)
            archive = Path(folder) / SDIST_NAME
            if not archive.is_file():
                raise BuildError(
                    f"pip could not fetch the source of Horovod {HOROVOD_VERSION}: "
                    f"{done.text.strip()[-800:]}\nWithout a network, fetch {SDIST_NAME} elsewhere "
                    "and name it with: --sdist FILE")
            os.replace(archive, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SDIST_SHA256:
        path.unlink()
        raise BuildError(
            f"The downloaded {SDIST_NAME} has the SHA-256 {digest}, but {SDIST_SHA256} was "
            "expected; it was deleted. Try again, or name an archive that you trust: --sdist.")
    return path


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack the archive; returns the source folder."""
    try:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, OSError) as error:
        raise BuildError(f"{sdist} cannot be unpacked: {error}") from error
    source = folder / f"horovod-{HOROVOD_VERSION}"
    if not (source / "setup.py").is_file():
        raise BuildError(f"{sdist} holds no horovod-{HOROVOD_VERSION}/setup.py. Use the source "
                         f"archive of Horovod {HOROVOD_VERSION}.")
    return source


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One change to one file of Horovod's source; see `edits.toml`."""

    name: str
    reason: str
    file: str
    pattern: str
    replacement: str
    every: bool = False


def read_edits(*groups: str, **values: str) -> list[Edit]:
    """The edits of some groups, with values in place of their `@NAMES@`."""
    tables = tomllib.loads(_EDITS.read_text(encoding="utf-8"))
    edits = []
    for told in (told for group in groups for told in tables[group]):
        text = re.sub("@([A-Z_]+)@", lambda name: values[name[1].lower()], told["replacement"])
        edits.append(Edit(**told | {"replacement": text}))
    return edits


def all_edits(run_path: Iterable[str], *, gloo: bool, cuda: Cuda | None) -> list[Edit]:
    """The edits of a build; `run_path` are the folders of MPI and NCCL, relative to `$ORIGIN`."""
    edits = read_edits("common", *(["gloo"] if gloo else []), "runner",
                       run_path=";".join(run_path))
    if cuda is None:
        return edits
    return edits + read_edits(
        "stream", "nvcc" if cuda.home else "no_nvcc", static_runtime=str(cuda.static_runtime),
        includes=" ".join(f'"{folder}"' for folder in cuda.includes))


def apply_edits(source: Path, edits: Iterable[Edit], *, cuda: Cuda | None = None) -> None:
    """Change the unpacked source; BuildError if a file is missing or nothing in it matches."""
    for edit in edits:
        path = source / edit.file
        text = path.read_text() if path.is_file() else ""
        # A function, so that the text is taken as it is, without backslash escapes.
        new, count = re.subn(edit.pattern, lambda _, edit=edit: edit.replacement, text,
                             count=0 if edit.every else 1, flags=re.MULTILINE)
        if count == 0 or new == text:
            raise BuildError(
                f"The edit '{edit.name}' found nothing to change in {edit.file}. It was written "
                f"for Horovod {HOROVOD_VERSION} as published; use that source (leave out --sdist).")
        path.write_text(new)
    if cuda is not None and cuda.home is None:
        shutil.copy(_KERNELS_WITHOUT_NVCC, source / _KERNEL_FOLDER)


def build_tools(target: Target, cache: Path, env: dict[str, str]) -> dict[str, str]:
    """The variables by which a build finds setuptools, packaging and CMake.

    Those that the environment lacks go into a private folder of the cache.
    """
    cmake = shutil.which("cmake", path=f"{target.scripts}:{env.get('PATH', '')}")
    if cmake and _version(run_program([cmake, "--version"], env=env, limit_s=60).out) < (3, 13):
        cmake = None
    lacks = {"setuptools": _version(target.versions.get("setuptools", "")) < _SETUPTOOLS_WITH_WHEEL,
             "packaging": "packaging" not in target.versions, "cmake": not cmake}
    missing = [need for need in _TOOL_NEEDS if lacks[need.partition(">")[0]]]
    if cmake and not missing:
        return {"HOROVOD_CMAKE": cmake}
    folder = cache / f"tools-{target.soabi}"
    if not ((folder / "bin" / "cmake").exists() and (folder / "setuptools").is_dir()):
        get_logger().info("fetching build tools that the environment lacks: %s",
                          ", ".join(missing))
        temporary = Path(tempfile.mkdtemp(prefix="tools-", dir=cache))
        done = run_program([*_find_pip(target.python, env), "install", "--quiet",
                            "--target", temporary, *_TOOL_NEEDS], env=env)
        if done.code:
            shutil.rmtree(temporary)
            raise BuildError(f"pip could not fetch the build tools {', '.join(_TOOL_NEEDS)}: "
                             f"{done.text.strip()[-800:]}\nInstall them into the environment "
                             "with: pip install 'hvdtrain[build]'")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    return {"HOROVOD_CMAKE": cmake or str(folder / "bin" / "cmake"), "PYTHONPATH": str(folder)}


def _version(text: str) -> tuple[int, ...]:
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def find_installer(python: Path, env: dict[str, str]) -> list[str]:
    """A command that installs: of the target's own pip, else uv, else this interpreter's pip."""
    pip = _find_pip(python, env)
    if pip[0] == str(python):
        return [*pip, "install", "--quiet"]
    if uv := _find_uv(env):
        return [uv, "pip", "install", "--quiet", "--python", str(python)]
    return [*pip, "--python", str(python), "install", "--quiet"]


def _find_pip(python: Path, env: dict[str, str]) -> list[str]:
    """A pip for downloads (uv has none): the target's, ours, or uv's."""
    pip = [str(python), "-m", "pip"]
    if run_program([*pip, "--version"], env=env, limit_s=120).code == 0:
        return pip
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    uv = _find_uv(env)
    if uv is None:
        raise MachineError(f"Neither pip nor uv was found for {python}. Install pip with: "
                           f"{python} -m ensurepip")
    return [uv, "tool", "run", "--from", "pip", "pip"]


def _find_uv(env: dict[str, str]) -> str | None:
    return shutil.which("uv", path=f"{Path(sys.executable).parent}:{env.get('PATH', '')}")


def install_wheel(wheel: Path, target: Target, installer: list[str], env: dict[str, str]) -> None:
    """Install a wheel without dependencies, and what Horovod lacks to run.

    The wheel is always reinstalled: pip and uv go by version, and would keep a wrong one.
    """
    needs = [name for name in _RUNTIME_NEEDS if name not in target.versions]
    commands = [[*installer, "--no-deps", "--force-reinstall", str(wheel)]]
    if needs:
        get_logger().info("installing what Horovod needs to run: %s", ", ".join(needs))
        commands.append([*installer, *needs])
    for command in commands:
        done = run_program(command, env=env)
        if done.code:
            raise BuildError(f"`{' '.join(command)}` failed: {done.text.strip()[-800:]}")
