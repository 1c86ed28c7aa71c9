"""Program: builds a job once, as a rank does, and prints the figures that a comparison needs.

Started by `compare.py` with `python -m`, since it loads TensorFlow.
"""

from __future__ import annotations

import math
import sys

from hvdtrain.entry import load_job
from hvdtrain.errors import HvdtrainError
from hvdtrain.process import print_answer


def main() -> None:
    """Print one line of JSON; parameters are the trainable ones, as float32."""
    import keras

    from hvdtrain.data.source import one_sample, splits_of
    from hvdtrain.train.plan import build_model
    try:
        job = load_job(sys.argv[1])
        keras.utils.set_random_seed(job.config.seed or 0)
        train, model = splits_of(job.data()).train, job.model()
        build_model(model, lambda: one_sample(train))
        parameters = sum(math.prod(variable.shape) for variable in model.trainable_variables)
        print_answer({"parameters": parameters, "parameter_bytes": 4 * parameters,
                      "samples": len(train), "batch_per_rank": job.config.rank_batch(1),
                      "epochs": job.config.epochs})
    except HvdtrainError as error:
        sys.exit(f"hvdtrain: {error}")


if __name__ == "__main__":
    main()
