"""Program: builds a job once, as a rank does, and prints what must be known to compare.

Started by `probe.py` with `python -m`; it loads TensorFlow, which `compare` itself does not.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from hvdtrain.entry import load_job
from hvdtrain.errors import HvdtrainError

MARK = "HVDTRAIN-JOB "
_FLOAT32_BYTES = 4


def look(target: str) -> dict[str, Any]:
    """Build a job's data and model.

    Args:
        target: String, the job as typed.

    Returns:
        `parameters` and `parameter_bytes` (of all trainable ones, as float32), `samples`,
        `batch_per_rank`, `epochs`.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    from hvdtrain.data.source import ArraySource, DataSplits
    job = load_job(target)
    keras.utils.set_random_seed(job.config.seed or 0)
    data = job.data()
    train = data.train if isinstance(data, DataSplits) else data
    source = train if hasattr(train, "read") else ArraySource(train, name="train")
    model = job.model()
    if not model.built:
        sample = source.read(np.zeros(1, np.int64))
        inputs = sample[0] if isinstance(sample, tuple) else sample
        model(tf.nest.map_structure(tf.convert_to_tensor, inputs))
    parameters = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    return {"parameters": parameters, "parameter_bytes": parameters * _FLOAT32_BYTES,
            "samples": len(source), "batch_per_rank": job.config.rank_batch(1),
            "epochs": job.config.epochs}


def main() -> None:
    """Print one line of JSON."""
    try:
        found = look(sys.argv[1])
    except HvdtrainError as error:
        sys.exit(f"hvdtrain: {error}")
    print(MARK + json.dumps(found), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
