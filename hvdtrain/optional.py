"""Optional packages: imported where they are used, with an error that names the extra."""

from __future__ import annotations

import importlib
from types import ModuleType

from hvdtrain.errors import MissingExtraError

#: import name -> what to type to get it
HOW_TO_GET = {
    "tensorflow": "pip install 'hvdtrain[cpu]'   (or 'hvdtrain[gpu]')",
    "keras": "pip install 'hvdtrain[cpu]'   (or 'hvdtrain[gpu]')",
    "horovod.tensorflow": "hvdtrain build-horovod --install",
    "cloudpickle": "pip install 'hvdtrain[notebook]'",
    "mpi4py": "pip install 'hvdtrain[mpi]'",
    "sklearn": "pip install 'hvdtrain[data]'",
    "google_crc32c": "pip install 'hvdtrain[data]'",
    "pyarrow": "pip install 'hvdtrain[data]'",
    "matplotlib": "pip install 'hvdtrain[plots]'",
    "tensorboard": "pip install 'hvdtrain[plots]'",
}


def require(name: str, purpose: str) -> ModuleType:
    """Import an optional module, or MissingExtraError: `purpose` ends "is needed for ..."."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        top = name.split(".")[0]
        if missing.split(".")[0] != top:
            raise
        fix = HOW_TO_GET.get(name) or HOW_TO_GET.get(top) or f"pip install {top}"
        raise MissingExtraError(
            f"The package `{missing}` is needed for {purpose} but is not installed. "
            f"Install it with: {fix}"
        ) from error
