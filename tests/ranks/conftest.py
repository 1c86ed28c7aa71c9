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
