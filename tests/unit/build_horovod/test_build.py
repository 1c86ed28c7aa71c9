"""The way from options to a wheel, with fakes in place of the compiler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hvdtrain.build_horovod.build as build_module
from hvdtrain.build_horovod.build import build_horovod, failure_text, plan_key, run_path
from hvdtrain.build_horovod.options import BuildOptions
from hvdtrain.build_horovod.toolchain import Target, find_mpi
from hvdtrain.errors import ConfigError, MachineError

WHEEL = "horovod-0.28.1+x-cp311-cp311-linux_x86_64.whl"


@pytest.fixture
def fake_build(make_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces all that looks at the machine; returns the list of compilations."""
    compiled: list[str] = []

    def compile_wheel(recipe: Any, options: BuildOptions, *, build: Path, **more: Any) -> Path:
        compiled.append(recipe.key.tag)
        time.sleep(0.05)
        wheel = build / WHEEL
        wheel.write_bytes(b"wheel")
        return wheel

    fakes: dict[str, Any] = {
        "probe_target": lambda python, environ: make_target(),
        "find_compiler": lambda env: Path("/usr/bin/g++"), "check_make": lambda env: None,
        "check_import": lambda target, env: None, "compile_wheel": compile_wheel,
        "build_tools": lambda *args: {"HOROVOD_CMAKE": "cmake"},
        "get_sdist": lambda *args: Path("sdist"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(build_module, name, fake)
    return compiled


def _options(cache: Path, **changes: Any) -> BuildOptions:
    return BuildOptions(python=Path("python"), cache=cache, **changes)


def test_second_call_takes_the_wheel_from_the_cache(tmp_path: Path,
                                                    fake_build: list[str]) -> None:
    first = build_horovod(_options(tmp_path), environ={})
    second = build_horovod(_options(tmp_path), environ={})
    assert (first.cached, second.cached) == (False, True)
    assert first.wheel == second.wheel == tmp_path / "wheels" / first.tag / WHEEL
    assert len(fake_build) == 1
    assert (first.wheel.parent / "key.json").is_file()


def test_force_builds_again(tmp_path: Path, fake_build: list[str]) -> None:
    for _ in range(2):
        assert not build_horovod(_options(tmp_path, force=True), environ={}).cached
    assert len(fake_build) == 2


def test_parallel_calls_compile_once(tmp_path: Path, fake_build: list[str]) -> None:
    threads = [threading.Thread(target=build_horovod, args=(_options(tmp_path),),
                                kwargs={"environ": {}}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake_build) == 1


def test_gloo_and_mpi_have_their_own_wheels(tmp_path: Path, fake_build: list[str]) -> None:
    tags = {plan_key(_options(tmp_path, **changes), environ={}).key.tag
            for changes in ({}, {"gloo": False}, {"mpi": "none"})}
    assert len(tags) == 3


def test_gpu_for_a_cpu_tensorflow_is_refused(tmp_path: Path, fake_build: list[str]) -> None:
    with pytest.raises(MachineError, match="is a CPU build, and a GPU Horovod does not load"):
        plan_key(_options(tmp_path, gpu=True), environ={})


def test_build_folder_with_a_space_is_refused(tmp_path: Path, fake_build: list[str]) -> None:
    with pytest.raises(MachineError, match="has a space in its path"):
        build_horovod(_options(tmp_path, keep_build=tmp_path / "my build"), environ={})
    assert fake_build == []


@pytest.mark.parametrize(("changes", "message"), [
    ({"mpi": "lam"}, "mpi must be one of 'auto', 'openmpi', .*'lam'"),
    ({"mpi": "none", "gloo": False}, "nothing to start ranks with"),
    ({"jobs": -1}, "jobs must be at least 0. Received: jobs=-1"),
])
def test_options_that_cannot_work(tmp_path: Path, changes: dict[str, Any],
                                  message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _options(tmp_path, **changes)


def test_run_path_is_relative_to_the_library(make_target: Callable[..., Target]) -> None:
    target = make_target()
    paths = run_path(target, find_mpi(target, wanted="openmpi", environ={}), None)
    assert "$ORIGIN/../../../../../lib" in paths
    assert all(path.startswith("$ORIGIN/") for path in paths)


def test_failure_shows_the_first_errors_and_the_log(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text("noise\nmpi_ops.cc:7:10: fatal error: x.h: No such file\n"
                   "c++: fatal error: Killed signal terminated program cc1plus\nnoise\n")
    text = failure_text(log, 12.3)
    assert text.startswith("The build of Horovod failed after 12 s. The first errors:\n"
                           "  mpi_ops.cc:7:10: fatal error: x.h: No such file\n")
    assert "--jobs 1" in text
    assert text.endswith(f"Full log: {log}")
