"""One process with TensorFlow: a session of one rank for all tests of this folder."""

import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@pytest.fixture(scope="session", autouse=True)
def one_rank():
    import hvdtrain
    environ = {k: v for k, v in os.environ.items()
               if not k.startswith(("HOROVOD_", "OMPI_", "PMI", "SLURM_", "TF_CONFIG"))}
    return hvdtrain.init(environ=environ)


@pytest.fixture(autouse=True)
def fresh_keras():
    import keras
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
