"""The named models and data sets: shapes, and that every variable is trained and saved."""

import functools

import keras
import numpy as np
import pytest

from hvdtrain.errors import ConfigError, DataError
from hvdtrain.job import Named
from hvdtrain.zoo import DATASETS, MODELS, datasets, models

PAIRS = [
    (models.digits_mlp, lambda: datasets.digits(), "sparse_categorical_crossentropy"),
    (models.digits_cnn, lambda: datasets.digits_images(), "sparse_categorical_crossentropy"),
    (models.autoencoder, lambda: datasets.digits(target="input"), "mse"),
    (functools.partial(models.text_transformer, blocks=1), lambda: datasets.text(),
     keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
]


@pytest.mark.parametrize(("model", "data", "loss"), PAIRS, ids=lambda p: getattr(p, "__name__", ""))
def test_a_model_fits_its_data_and_trains_and_saves_every_variable(model, data, loss, tmp_path):
    splits, built = data(), model()
    x, y = splits.train.read(np.arange(8))
    before = [v.numpy() for v in built.trainable_variables]
    built.compile(keras.optimizers.Adam(0.01), loss)
    built.train_on_batch(x, y)
    for old, variable in zip(before, built.trainable_variables, strict=True):
        assert not np.array_equal(old, variable.numpy()), variable.path
    built.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), built.predict(x, verbose=0),
                               atol=1e-6)
    assert len(splits.validation) > 0


def test_a_perceptron_of_any_size():
    built = models.mlp(features=16, hidden=32, depth=3, classes=5)
    assert built.count_params() == 16 * 32 + 32 + 2 * (32 * 32 + 32) + 32 * 5 + 5
    assert models.mlp().count_params() == 1_126_410  # as its docstring says
    x, y = datasets.synthetic(samples=256, features=16, classes=5).train.read(np.arange(256))
    built.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    losses = built.fit(x, y, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]


def test_digits_hold_out_a_fifth_that_is_not_trained_on():
    splits = datasets.digits()
    assert (len(splits.train), len(splits.validation)) == (1438, 359)
    train = {row.tobytes() for row in splits.train.arrays[0]}
    held = [row.tobytes() for row in splits.validation.arrays[0]]
    assert not train & set(held)


def test_text_is_real_and_targets_are_the_next_characters():
    x, y = datasets.text(length=32).train.read(np.arange(3))
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    assert x.min() >= 0
    assert x.max() <= 95
    assert "Breast cancer Wisconsin" in "".join(chr(c + 32) for c in x.ravel())


def test_a_text_that_is_too_short_is_refused(tmp_path):
    (tmp_path / "t.txt").write_text("short")
    with pytest.raises(DataError, match="5 characters are too few for windows of 64"):
        datasets.text(path=str(tmp_path / "t.txt"))


@pytest.mark.parametrize("registry", [MODELS, DATASETS])
def test_every_registered_name_resolves(registry, tmp_path):
    from hvdtrain.entry import resolve
    for name in registry:
        assert callable(resolve(Named(name=name), registry, "model", tmp_path))
    with pytest.raises(ConfigError, match="Unknown model 'nothing'. Known:"):
        resolve(Named(name="nothing"), registry, "model", tmp_path)
