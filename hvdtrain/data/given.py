"""Whatever Keras' `fit`, `evaluate` and `predict` are given, divided over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras.src.trainers import data_adapters

from hvdtrain.config import DEFAULT_BATCH
from hvdtrain.data.array_adapter import ArrayAdapter
from hvdtrain.data.keras_adapters import RankAdapter
from hvdtrain.data.part import Part


def adapter_of(x: Any, y: Any = None, sample_weight: Any = None, *,  # noqa: D417
               part: Part,               batch_size: int | None = None, per_rank: bool = False,
               class_weight: Mapping[int, float] | None = None, shuffle: Any = False,
               steps: int | None = None, seed: int | None = None,
               before_decoding: bool = True) -> RankAdapter:
    """Whatever Keras' `fit`, `evaluate` and `predict` take, divided over the ranks.

    Args:
        x: As in Keras; so are y, sample_weight, class_weight and shuffle.
        part: This rank's part of a global batch.
        batch_size: Integer; as in Keras, of arrays only.
        per_rank: Boolean, what a batch is: of each rank, or of all ranks together.
        steps: Integer, the steps of an epoch.
        seed: Integer, as for `ArrayAdapter`.
        before_decoding: Boolean, as for `data.divided.divided`.

    Raises:
        ValueError: What Keras raises of data that it does not take.
    """
    grouped = part.size if per_rank else 1
    if per_rank and (batch_size is not None or steps is None):
        batch_size = (batch_size or DEFAULT_BATCH) * part.size
    given = data_adapters.get_data_adapter(
        x=x, y=y, sample_weight=sample_weight, batch_size=batch_size, steps_per_epoch=steps,
        shuffle=shuffle, class_weight=class_weight)
    if isinstance(given, RankAdapter):
        return given
    if isinstance(given, data_adapters.ArrayDataAdapter):
        return ArrayAdapter(given, part, growth=grouped, seed=seed)
    return RankAdapter(given, part, batches_per_step=grouped, before_decoding=before_decoding)
