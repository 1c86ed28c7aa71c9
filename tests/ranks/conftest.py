"""What tests on ranks need: the driver's own process loads neither Keras nor TensorFlow."""

import pytest


@pytest.fixture
def keras():
    return pytest.importorskip("keras")


@pytest.fixture
def tf():
    return pytest.importorskip("tensorflow")


@pytest.fixture(autouse=True)
def plain_keras_is_alone(request):
    """Tests compare with plain Keras, which each rank trains for itself."""
    if "rank_session" not in request.fixturenames:
        yield
        return
    import hvdtrain
    with hvdtrain.alone():
        yield


@pytest.fixture
def hvd(rank_session, monkeypatch, keras):
    """`hvdtrain.tensorflow`, in a script for Horovod."""
    import hvdtrain.tensorflow as module
    from hvdtrain.tensorflow import keras as _  # noqa: F401 - hvd.keras
    from hvdtrain.train import distribute
    monkeypatch.setattr(distribute, "_horovod_way", [])
    monkeypatch.setattr(distribute, "_alone", [])
    module.init()
    keras.utils.set_random_seed(1)
    return module


@pytest.fixture
def hvk(hvd):
    return hvd.keras
