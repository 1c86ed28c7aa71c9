"""The static check, on fabricated site-packages and on a real library."""

from __future__ import annotations

import json
import struct
import sysconfig
from pathlib import Path

import pytest

from hvdtrain.horovod_check import HorovodCheck, check_horovod, read_elf

SUFFIX = ".cpython-311-x86_64-linux-gnu.so"
FIX = "run: hvdtrain build-horovod --install"


def make_elf(needed: list[str], run_path: str) -> bytes:
    """A 64-bit ELF file that holds nothing but a dynamic section and its strings."""
    strings, offsets = b"\0", []
    for text in [*needed, run_path]:
        offsets.append(len(strings))
        strings += text.encode() + b"\0"
    tags = [(1, offset) for offset in offsets[:-1]] + [(29, offsets[-1]), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *tag) for tag in tags)
    header = 0x40
    sections = [
        (0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        (0, 3, 0, 0, header, len(strings), 0, 0, 0, 0),
        (0, 6, 0, 0, header + len(strings), len(dynamic), 1, 0, 0, 16),
    ]
    start = header + len(strings) + len(dynamic)
    head = bytearray(header)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 0x28, start)
    struct.pack_into("<HH", head, 0x3A, 64, len(sections))
    table = b"".join(struct.pack("<IIQQQQIIQQ", *section) for section in sections)
    return bytes(head) + strings + dynamic + table


class Site:
    """A fabricated site-packages with Horovod and TensorFlow."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "lib").mkdir()
        self.horovod()
        self.tensorflow("tensorflow_cpu", "2.21.0")
        (root / "lib" / "libmpi.so.40").touch()

    def horovod(self, *, built_for: str = "2.21.0", needed: tuple[str, ...] = ("libmpi.so.40",),
                suffix: str = SUFFIX, mark: bytes = b"HOROVOD_GLOO_RENDEZVOUS_ADDR") -> None:
        home = self.root / "horovod"
        (home / "tensorflow").mkdir(parents=True, exist_ok=True)
        (home / "__init__.py").touch()
        (home / "metadata.json").write_text(json.dumps({"tensorflow": built_for}))
        (self.root / "horovod-0.28.1+x.dist-info").mkdir(exist_ok=True)
        for old in (home / "tensorflow").iterdir():
            old.unlink()
        library = home / "tensorflow" / f"mpi_lib{suffix}"
        library.write_bytes(make_elf(list(needed), "$ORIGIN/../../lib") + mark)

    def tensorflow(self, dist: str, version: str, *, cuda: bool = False) -> None:
        folder = self.root / "tensorflow" / "python" / "platform"
        folder.mkdir(parents=True, exist_ok=True)
        (self.root / "tensorflow" / "__init__.py").touch()
        (folder / "build_info.py").write_text(f"x = OrderedDict([('is_cuda_build', {cuda})])")
        for old in self.root.glob(f"{dist}-*.dist-info"):
            old.rmdir()
        (self.root / f"{dist}-{version}.dist-info").mkdir()

    def check(self) -> HorovodCheck:
        return check_horovod(paths=[self.root], ext_suffix=SUFFIX)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return Site(tmp_path)


def test_all_fits(site: Site) -> None:
    found = site.check()
    assert found == HorovodCheck(
        installed=True, version="0.28.1+x", tensorflow_built_for="2.21.0",
        tensorflow_installed="2.21.0", mpi_library="libmpi.so.40", mpi_kind="openmpi", gloo=True)
    assert found.ok


def test_not_installed(tmp_path: Path) -> None:
    found = check_horovod(paths=[tmp_path])
    assert (found.installed, found.ok) == (False, False)
    assert found.problems == (f"Horovod is not installed; {FIX}",)


def test_another_tensorflow(site: Site) -> None:
    site.horovod(built_for="2.20.0")
    found = site.check()
    assert found.problems == (
        f"Horovod was built for TensorFlow 2.20.0, but TensorFlow 2.21.0 is installed; {FIX}",)
    assert not found.ok


def test_post_release_of_tensorflow_is_the_same(site: Site) -> None:
    site.tensorflow("tensorflow_cpu", "2.21.0.post1")
    assert site.check().ok


def test_release_candidate_of_tensorflow_is_another(site: Site) -> None:
    site.tensorflow("tensorflow_cpu", "2.21.0rc0")
    assert not site.check().ok


def test_tensorflow_is_gone(site: Site) -> None:
    for path in site.root.glob("tensorflow*"):
        path.rename(site.root / "lib" / path.name)
    assert "but TensorFlow is not installed; run: pip install" in site.check().problems[0]


def test_tensorflow_without_metadata_is_only_a_warning(site: Site) -> None:
    (site.root / "tensorflow_cpu-2.21.0.dist-info").rmdir()
    found = site.check()
    assert found.ok
    assert "its version is not known" in found.warnings[0]


def test_two_tensorflows(site: Site) -> None:
    site.tensorflow("tensorflow", "2.21.0")
    found = site.check()
    assert found.ok
    assert "Both `tensorflow` and `tensorflow-cpu`" in found.warnings[0]


def test_built_for_another_python(site: Site) -> None:
    site.horovod(suffix=".cpython-312-x86_64-linux-gnu.so")
    assert site.check().problems == (
        f"Horovod 0.28.1+x has no TensorFlow library for this Python (mpi_lib{SUFFIX}): it has "
        "mpi_lib.cpython-312-x86_64-linux-gnu.so, so it was built for another Python; " + FIX,)


def test_without_native_code(site: Site) -> None:
    (site.root / "horovod" / "tensorflow" / f"mpi_lib{SUFFIX}").unlink()
    assert "it was installed without native code" in site.check().problems[0]


def test_gpu_wheel_in_a_cpu_tensorflow(site: Site) -> None:
    site.horovod(needed=("libnccl.so.2",))
    (site.root / "lib" / "libnccl.so.2").touch()
    found = site.check()
    assert found.nccl
    assert found.problems == (
        "Horovod was built for a GPU TensorFlow, but the installed TensorFlow is a CPU build; "
        + FIX,)


def test_cpu_wheel_in_a_gpu_tensorflow_is_a_warning(site: Site) -> None:
    site.tensorflow("tensorflow_cpu", "2.21.0", cuda=True)
    found = site.check()
    assert found.ok
    assert "Horovod has no NCCL" in found.warnings[0]


def test_library_of_the_mpi_is_gone(site: Site) -> None:
    site.horovod(needed=("libmpi.so.4711",))
    assert site.check().problems == (f"Horovod needs libmpi.so.4711, which was not found; {FIX}",)


def test_library_path_is_searched(site: Site, monkeypatch: pytest.MonkeyPatch,
                                  tmp_path: Path) -> None:
    site.horovod(needed=("libmpi.so.4711",))
    (tmp_path / "libmpi.so.4711").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}")
    assert site.check().ok


def test_without_mpi_and_without_gloo(site: Site) -> None:
    site.horovod(needed=("libc.so.6",), mark=b"")
    found = site.check()
    assert (found.mpi_library, found.mpi_kind, found.gloo) == (None, None, False)


def test_elf_of_a_real_library() -> None:
    import _struct

    shared = Path(getattr(_struct, "__file__", None) or str(sysconfig.get_config_var("LIBDIR")))
    library = shared if shared.is_file() else next(shared.glob("libpython3*.so*"))
    assert any(name.startswith("libc.so") for name in read_elf(library.read_bytes()).needed)


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x02\x01", b"\x7fELF\x01\x01"])
def test_what_is_no_elf_file_needs_nothing(content: bytes) -> None:
    assert read_elf(content).needed == ()
