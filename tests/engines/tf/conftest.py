"""For the tests of engine tf, in whichever process they run."""

import pytest


@pytest.fixture
def warnings_of():
    """A function that gives the warnings of hvdtrain's logger so far."""
    from hvdtrain.log import get_logger
    seen = []

    def remember(record):
        seen.append(record)
        return True
    get_logger().addFilter(remember)  # its handlers are replaced when a run begins
    yield lambda: [r.getMessage() for r in seen if r.levelname == "WARNING"]
    get_logger().removeFilter(remember)


@pytest.fixture(scope="session")
def split_cpu():
    """Two CPU devices in this process; before TensorFlow runs its first operation."""
    import tensorflow as tf
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)


@pytest.fixture
def fresh_keras(split_cpu):
    """No layer names, policy or graph of another test."""
    import keras
    keras.backend.clear_session(free_memory=False)
    yield
    keras.config.set_dtype_policy("float32")
