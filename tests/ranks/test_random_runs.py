"""A few of the random runs of `benchmarks/random_runs.py`; a case is drawn from its seed."""

from pathlib import Path

import pytest

from tests import random_runs


@pytest.fixture
def float64(keras, monkeypatch):
    from hvdtrain.train import coordinator
    monkeypatch.setattr(coordinator, "AGREE_EVERY_S", 0.0)
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)


def check(seed, session, keras, tmp_path):
    case = random_runs.draw(seed, session.world.size)
    folder = session.collective.gather_objects(str(tmp_path))[0]
    largest, where = random_runs.difference(case, keras, session, Path(folder) / "run")
    assert largest <= 1e-5, f"{where}: {random_runs.text(case)}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("seed", [11, 14])
def test_two_ranks_equal_one_process(seed, rank_session, keras, float64, tmp_path):
    check(seed, rank_session, keras, tmp_path)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("seed", [6])
def test_three_ranks_equal_one_process(seed, rank_session, keras, float64, tmp_path):
    check(seed, rank_session, keras, tmp_path)
