"""One seed for all ranks, so that what nobody has seeded comes out alike on all of them."""

from __future__ import annotations

import os
import random
import zlib

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from hvdtrain.collectives.base import Collective

_drawn: list[int] = []


def drawn_seed() -> int | None:
    """The seed that the ranks have agreed on, where the script has set none of its own."""
    return _drawn[0] if _drawn and context.global_seed() == _drawn[0] else None


def agree_on_seeds(collective: Collective) -> None:
    """Seed the random generators alike, unless they are. All ranks; before data are made.

    Those of Python and NumPy where they differ, and that of TensorFlow where it has no seed or
    another one: a shuffle without a seed would have an order of its own on each rank. What the
    user has seeded alike stays as it is. The seed is drawn anew in each run.

    See `drawn_seed`.
    """
    own = zlib.crc32(repr((random.getstate(), np.random.get_state())).encode())  # noqa: NPY002
    drawn = int.from_bytes(os.urandom(4), "little")
    everyone = collective.gather_objects((own, context.global_seed(), drawn))
    seed = everyone[0][2]
    _drawn[:] = [seed]
    if any(theirs[0] != everyone[0][0] for theirs in everyone):
        keras.utils.set_random_seed(seed)
    elif any(theirs[1] is None or theirs[1] != everyone[0][1] for theirs in everyone):
        tf.random.set_seed(seed)
