"""What tests on ranks need: the driver's own process loads neither Keras nor TensorFlow."""

import pytest


@pytest.fixture
def keras():
    return pytest.importorskip("keras")


@pytest.fixture
def tf():
    return pytest.importorskip("tensorflow")
