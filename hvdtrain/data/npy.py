"""`load_npy`: arrays in `.npy` files as a source, memory-mapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.source import ArraySource
from hvdtrain.errors import DataError


def load_npy(x: str | Path, y: str | Path | None = None,
             sample_weight: str | Path | None = None) -> ArraySource:
    """Open `.npy` files as a source; each rank reads only the rows it trains on.

    Args:
        x: Path of the inputs.
        y: Path of the targets, or None.
        sample_weight: Path of the sample weights, or None; only with `y`.

    Raises:
        DataError: A file is missing, unreadable or empty, or they differ in length.
    """
    if sample_weight is not None and y is None:
        raise DataError("sample_weight needs y: Keras knows weights only beside targets.")
    arrays = [_open(Path(path)) for path in (x, y, sample_weight) if path is not None]
    return ArraySource(tuple(arrays) if len(arrays) > 1 else arrays[0], name=str(x))


def _open(file: Path) -> np.ndarray[Any, Any]:
    if not file.is_file():
        raise DataError(f"The data file {file} does not exist. Expected a .npy file. A relative "
                        f"path is taken from the folder {Path.cwd()}.")
    try:
        array = np.lib.format.open_memmap(file, mode="r")
    except (ValueError, OSError, EOFError) as error:
        # An array of no elements cannot be mapped either.
        raise DataError(f"{file} cannot be read as a .npy file with at least one sample ({error}). "
                        "Write it with numpy.save(file, array).") from error
    return array
