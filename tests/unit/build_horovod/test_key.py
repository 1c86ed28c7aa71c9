"""The cache key: stable, complete, and a valid local version."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from packaging.version import Version

from hvdtrain.build_horovod.build import BuildKey

CPU = BuildKey(tensorflow="2.21.0", tensorflow_build="cpu", soabi="cpython-311-x86_64-linux-gnu",
               machine="x86_64", libc="glibc-2.36", mpi="openmpi-5", gloo=True, recipe=1)


def test_tag_is_stable_across_runs_and_machines() -> None:
    assert CPU.tag == "tf2.21.0.openmpi.5.gloo.cpu.r1.h04314094"


def test_every_field_changes_the_tag() -> None:
    for field in fields(BuildKey):
        value = getattr(CPU, field.name)
        other = (not value if isinstance(value, bool) else value + 1 if isinstance(value, int)
                 else f"{value}9")
        assert replace(CPU, **{field.name: other}).tag != CPU.tag, field.name


@pytest.mark.parametrize("key", [
    CPU,
    replace(CPU, mpi="none"),
    replace(CPU, gloo=False, tensorflow="2.17.0-rc1"),
    replace(CPU, tensorflow_build="gpu", nccl="2.32", cuda="12", variant="nvcc-80,90"),
])
def test_tag_is_a_local_version_as_pip_writes_it(key: BuildKey) -> None:
    assert str(Version(f"0.28.1+{key.tag}")) == f"0.28.1+{key.tag}"


def test_gpu_tag_names_nccl_and_cuda() -> None:
    key = replace(CPU, nccl="2.32", cuda="12", variant="nonvcc")
    assert ".nccl2.32.cu12." in key.tag


def test_json_holds_the_fields_and_the_tag() -> None:
    read = json.loads(CPU.as_json())
    assert read["tag"] == CPU.tag
    assert {field.name for field in fields(BuildKey)} == set(read) - {"tag"}
