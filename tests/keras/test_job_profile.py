"""What the run that `hvdtrain plan` measures sees of the steps of a job."""

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.bench.job_profile import measure

WIDE = 600


def make_job(embedding=False, **settings):
    def model():
        inputs = (keras.Input((4,), dtype="int32") if embedding else keras.Input((WIDE,)))
        first = [keras.layers.Embedding(5000, 16), keras.layers.Flatten()] if embedding else []
        made = keras.Sequential([inputs, *first, keras.layers.Dense(WIDE, activation="relu"),
                                 keras.layers.Dense(WIDE), keras.layers.Dense(4)])
        made.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(True))
        return made
    x = np.zeros((64, 4), "int32") if embedding else np.ones((64, WIDE), "float32")
    return hvdtrain.Job(
        name="profiled", model=model, data=lambda: (x, np.zeros(64, "int32")),
        config=hvdtrain.TrainConfig(batch_per_rank=8, epochs=1000, check_weights=False, **settings))


def profile(**options):
    job = make_job(**options)
    return measure(job, job.config, hvdtrain.init(), 0.2)


def sizes(found, kind):
    return sorted((one["size"] for one in found["transfers"] if one["kind"] == kind), reverse=True)


def test_buckets_are_those_of_the_reducer_and_their_moments_within_the_backward_pass():
    found = profile(bucket_mb=1.0)
    layers = [4 * WIDE * (WIDE + 1), 4 * WIDE * (WIDE + 1), 4 * 4 * (WIDE + 1)]
    assert sum(sizes(found, "reduce")) == pytest.approx(sum(layers))
    assert found["parameter_bytes"] == sum(layers)
    assert len(found["transfers"]) > 1
    moments = [one["ready_s"] for one in found["transfers"]]
    assert moments == sorted(moments)
    assert 0 < moments[0] < 0.95 * moments[-1]
    assert moments[-1] <= found["compute_s"] * 1.01
    assert found["update_s"] > 0
    assert found["samples"] == 64
    assert found["read_s"] > 0


def test_one_bucket_is_ready_last():
    found = profile(bucket_mb=32.0)
    assert max(sizes(found, "reduce")) > 0.99 * found["parameter_bytes"]
    assert found["transfers"][-1]["ready_s"] == pytest.approx(found["compute_s"], rel=0.05)


def test_half_the_bytes_travel_when_compressed():
    whole, half = profile(), profile(compression="fp16")
    assert sum(sizes(half, "reduce")) == pytest.approx(sum(sizes(whole, "reduce")) / 2)
    packed = profile(compression="bf16")  # parts are exchanged, and the sums gathered
    assert sum(sizes(packed, "divide")) == pytest.approx(sum(sizes(whole, "reduce")), rel=0.01)


def test_rows_of_embeddings_count_as_what_a_rank_gives():
    found = profile(embedding=True)
    # All samples have one row of the table: its 16 values, and its number.
    assert sizes(found, "gather") == [4 * 16, 4]


def test_zero_divides_gradients_and_gathers_variables():
    found = profile(zero=True)
    assert sum(sizes(found, "divide")) == pytest.approx(2 * found["parameter_bytes"], rel=0.01)
    assert not sizes(found, "reduce")


def test_the_training_leaves_nothing_behind():
    from hvdtrain.optim.reducer import GradientReducer
    profile()
    assert GradientReducer.observer is None
