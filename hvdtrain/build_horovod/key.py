"""The cache key: everything that decides whether a wheel fits, and nothing else.

Paths, the compiler and the number of jobs are not in it: a wheel is relocatable, and serves
every environment with the same key.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass

HOROVOD_VERSION = "0.28.1"

#: Raise it whenever an edit, a flag or a run path changes: older wheels are then built anew.
RECIPE = 2


@dataclass(frozen=True, kw_only=True)
class BuildKey:
    """What a wheel was built for."""

    tensorflow: str
    tensorflow_build: str
    """`cpu` or `gpu`: the versions can be equal, the symbols are not."""
    soabi: str
    machine: str
    libc: str
    mpi: str
    """Kind and major version, e.g. `openmpi-5`, or `none`."""
    gloo: bool
    nccl: str = "none"
    """Major and minor version, e.g. `2.32`."""
    cuda: str = "none"
    """Major version of the CUDA that is linked."""
    variant: str = ""
    """GPU only: `nonvcc`, or the compute capabilities."""
    horovod: str = HOROVOD_VERSION
    recipe: int = RECIPE

    @property
    def digest(self) -> str:
        """Eight hex digits over all fields."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def tag(self) -> str:
        """The wheel's local version and the name of its folder in the cache."""
        parts = [f"tf{self.tensorflow}"]
        if self.mpi != "none":
            parts.append(self.mpi)
        if self.gloo:
            parts.append("gloo")
        parts.append("cpu" if self.nccl == "none" else f"nccl{self.nccl}.cu{self.cuda}")
        text = ".".join([*parts, f"r{self.recipe}", f"h{self.digest}"]).lower()
        return re.sub(r"\.+", ".", re.sub(r"[^a-z0-9.]", ".", text))

    def as_json(self) -> str:
        """The key with its tag, for `--key` and for `key.json` beside the wheel."""
        return json.dumps({**asdict(self), "tag": self.tag}, indent=1, sort_keys=True)
