"""What is read of the target environment, and which TensorFlow is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.build_horovod.toolchain import (
    Target,
    check_path,
    check_tensorflow,
    probe_target,
)
from hvdtrain.errors import EXIT_BUILD, BuildError, MachineError


@pytest.mark.parametrize("version", ["2.16.2", "2.17.1", "2.18.1", "2.19.1", "2.20.0", "2.21.0"])
def test_tried_tensorflow_is_accepted(version: str, make_target: Callable[..., Target]) -> None:
    check_tensorflow(make_target(tensorflow=version), force=False)


@pytest.mark.parametrize("version", ["2.15.1", "2.22.0", "3.0.0", "1.15.5"])
def test_other_tensorflow_is_refused(version: str, make_target: Callable[..., Target]) -> None:
    target = make_target(tensorflow=version)
    with pytest.raises(BuildError) as caught:
        check_tensorflow(target, force=False)
    assert str(caught.value) == (
        f"TensorFlow {version} is installed, but this recipe was tried with TensorFlow 2.16 to "
        "2.21 only. Install one of these, or try it anyway with: hvdtrain build-horovod --force")
    assert caught.value.exit_code == EXIT_BUILD
    check_tensorflow(target, force=True)


def test_missing_tensorflow(make_target: Callable[..., Target]) -> None:
    target = make_target(tensorflow=None, tensorflow_dist=None)
    with pytest.raises(MachineError, match="TensorFlow is not installed for"):
        check_tensorflow(target, force=True)


def test_space_in_the_path_is_refused(make_target: Callable[..., Target]) -> None:
    with pytest.raises(MachineError, match=r"has a space in it \(/home/my env\)"):
        check_path(make_target(prefix=Path("/home/my env")))


def test_interpreter_that_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="does not run"):
        probe_target(tmp_path / "python", {})


def test_this_interpreter(tmp_path: Path) -> None:
    target = probe_target(Path(sys.executable), {"PATH": "/usr/bin:/bin"})
    assert target.prefix == Path(sys.prefix)
    assert "packaging" in target.versions
    assert target.soabi
