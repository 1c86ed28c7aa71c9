"""pip, uv and the Python side of the build: downloads, private build tools, installation."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.build_horovod.key import HOROVOD_VERSION
from hvdtrain.build_horovod.probe import Target
from hvdtrain.build_horovod.process import run
from hvdtrain.errors import BuildError, MachineError
from hvdtrain.log import get_logger

RUNTIME_NEEDS = ("cloudpickle", "psutil", "pyyaml", "packaging")
_TOOL_NEEDS = {"setuptools": "setuptools>=77", "packaging": "packaging>=23",
               "cmake": "cmake>=3.25"}
_SETUPTOOLS_WITH_WHEEL = (70, 1)  # builds wheels without the package `wheel`


@dataclass(frozen=True, kw_only=True)
class BuildTools:
    """The Python packages that compile a wheel."""

    cmake: Path
    python_path: Path | None
    """Private folder with what the environment lacks; None when it lacks nothing."""


@dataclass(frozen=True, kw_only=True)
class Installer:
    """A command that installs into the target environment."""

    start: tuple[str, ...]
    reinstall: str
    """The option that copies a wheel anew even if that version is there."""


def _has_pip(python: Path, env: dict[str, str]) -> bool:
    return run([python, "-m", "pip", "--version"], env=env, timeout_s=120).code == 0


def _find_uv(env: dict[str, str]) -> str | None:
    beside = Path(sys.executable).parent
    return shutil.which("uv", path=f"{beside}:{env.get('PATH', '')}")


def _no_pip(python: Path) -> MachineError:
    return MachineError(f"Neither pip nor uv was found for {python}. Install pip with: "
                        f"{python} -m ensurepip")


def find_installer(python: Path, env: dict[str, str]) -> Installer:
    """The target's own pip, else uv, else this interpreter's pip.

    Raises:
        MachineError: There is none.
    """
    if _has_pip(python, env):
        return Installer(start=(str(python), "-m", "pip", "install", "--quiet"),
                         reinstall="--force-reinstall")
    uv = _find_uv(env)
    if uv:
        return Installer(start=(uv, "pip", "install", "--quiet", "--python", str(python)),
                         reinstall="--reinstall")
    if importlib.util.find_spec("pip") is None:
        raise _no_pip(python)
    return Installer(reinstall="--force-reinstall", start=(
        sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"))


def find_pip(python: Path, env: dict[str, str]) -> list[str]:
    """A command that starts some pip, for downloads (uv has none): the target's, ours, or uv's.

    Raises:
        MachineError: There is none.
    """
    if _has_pip(python, env):
        return [str(python), "-m", "pip"]
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    uv = _find_uv(env)
    if uv is None:
        raise _no_pip(python)
    return [uv, "tool", "run", "--from", "pip", "pip"]


def download_sdist(destination: Path, *, python: Path, env: dict[str, str]) -> None:
    """Fetch Horovod's source archive from the package index.

    Raises:
        BuildError: pip fails.
    """
    get_logger().info("fetching the source of Horovod %s through pip", HOROVOD_VERSION)
    with tempfile.TemporaryDirectory(dir=destination.parent) as folder:
        done = run([*find_pip(python, env), "download", "--quiet", "--no-deps",
                    "--no-binary", "horovod", f"horovod=={HOROVOD_VERSION}", "-d", folder],
                   env=env)
        archive = Path(folder) / destination.name
        if not archive.is_file():
            raise BuildError(
                f"pip could not fetch the source of Horovod {HOROVOD_VERSION}: "
                f"{done.text.strip()[-800:]}\nWithout a network, fetch horovod-"
                f"{HOROVOD_VERSION}.tar.gz elsewhere and name it with: --sdist FILE")
        os.replace(archive, destination)


def build_tools(target: Target, cache: Path, env: dict[str, str]) -> BuildTools:
    """setuptools, packaging and CMake; what is missing goes into a private folder of the cache.

    Raises:
        BuildError: pip cannot fetch them.
    """
    setuptools = _version(target.versions.get("setuptools", "0"))
    cmake = shutil.which("cmake", path=f"{target.scripts}:{env.get('PATH', '')}")
    if cmake and _cmake_version(cmake, env) < (3, 13):
        cmake = None
    missing = [need for name, need in _TOOL_NEEDS.items() if (
        setuptools < _SETUPTOOLS_WITH_WHEEL if name == "setuptools"
        else not cmake if name == "cmake" else name not in target.versions)]
    if cmake and not missing:
        return BuildTools(cmake=Path(cmake), python_path=None)
    folder = cache / f"tools-{target.soabi}"
    _install_tools(folder, list(_TOOL_NEEDS.values()), missing, target=target, env=env)
    return BuildTools(cmake=Path(cmake) if cmake else folder / "bin" / "cmake",
                      python_path=folder)


def _install_tools(folder: Path, needs: list[str], missing: list[str], *, target: Target,
                   env: dict[str, str]) -> None:
    """Install all build tools below `folder` unless they are there."""
    if (folder / "bin" / "cmake").exists() and (folder / "setuptools").is_dir():
        return
    get_logger().info("fetching build tools that the environment lacks: %s", ", ".join(missing))
    temporary = Path(tempfile.mkdtemp(prefix="tools-", dir=folder.parent))
    done = run([*find_pip(target.python, env), "install", "--quiet", "--target", temporary,
                *needs], env=env)
    if done.code:
        shutil.rmtree(temporary)
        raise BuildError(f"pip could not fetch the build tools {', '.join(needs)}: "
                         f"{done.text.strip()[-800:]}\nInstall them into the environment with: "
                         "pip install 'hvdtrain[build]'")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _cmake_version(cmake: str, env: dict[str, str]) -> tuple[int, ...]:
    done = run([cmake, "--version"], env=env, timeout_s=60)
    match = re.search(r"version\s+(\d+\.\d+)", done.out)
    return _version(match.group(1)) if match else (0, 0)


def install_wheel(wheel: Path, target: Target, installer: Installer, env: dict[str, str]) -> None:
    """Install a wheel without dependencies, and what Horovod needs to run if it is missing.

    The wheel is always copied anew: pip and uv go by version, and would keep a wrong one.

    Raises:
        BuildError: pip or uv fails.
    """
    needs = [name for name in RUNTIME_NEEDS if name not in target.versions]
    commands = [[*installer.start, "--no-deps", installer.reinstall, str(wheel)]]
    if needs:
        get_logger().info("installing what Horovod needs to run: %s", ", ".join(needs))
        commands.append([*installer.start, *needs])
    for command in commands:
        done = run(command, env=env)
        if done.code:
            raise BuildError(f"`{' '.join(command)}` failed: {done.text.strip()[-800:]}")
