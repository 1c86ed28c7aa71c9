"""`hvdtrain run`: unchanged scripts give on several ranks what they give on one process.

The plain scripts are compared with plain Python. A Horovod script has no such reference: stock
Horovod fails on Keras 3. It is compared with itself on one rank, with the batch and the learning
rate of all ranks together.
"""

import h5py
import numpy as np
import pytest

from tests import script_runs
from tests.script_runs import HOROVOD_RUNS, NAMES

pytestmark = pytest.mark.slow

#: Batches that do not divide by three, loops of one's own, data of each kind.
PLAIN_ON_THREE = ("every_callback", "gan", "loop_with_metrics", "pydataset")
HOROVOD_ON_THREE = ("custom_loop", "mnist_advanced", "word2vec")
#: What a step of a loop returns is each rank's own.
OF_EACH_RANK = {"own_loop": {"figures history loss"}}
#: Gradients in 16 bits: 11 bits of each, summed over 9 steps. And rounding of float32, which grows
#: through rectifiers and max pooling, on one processor five times as much as on another.
LIMITS = {"synthetic_fp16": 5e-5, "mnist_advanced": 1e-5}


def largest(name, found):
    """What is above the limit."""
    limit = LIMITS.get(name, script_runs.LIMIT)
    return {key: value for key, value in found.items()
            if value > limit and key not in OF_EACH_RANK.get(name, ())}


@pytest.mark.parametrize(("ranks", "name"), [
    *((2, name) for name in NAMES), *((3, name) for name in PLAIN_ON_THREE)])
def test_a_plain_script_gives_what_python_gives(ranks, name, scripts_run):
    plain, _ = scripts_run("plain", 0, NAMES)
    made, _ = scripts_run("run", ranks, NAMES if ranks == 2 else PLAIN_ON_THREE)
    for rank in range(ranks):
        found = script_runs.differences(plain / f"{name}-0.npz", made / f"{name}-{rank}.npz")
        assert {key.split()[0] for key in found} == {"weights", "figures", "predictions"}
        assert largest(name, found) == {}


@pytest.mark.parametrize(("ranks", "name"), [
    *((2, name) for name in HOROVOD_RUNS), *((3, name) for name in HOROVOD_ON_THREE)])
def test_a_horovod_script_gives_what_one_rank_with_all_of_the_batch_gives(
        ranks, name, scripts_run):
    names = tuple(HOROVOD_RUNS) if ranks == 2 else HOROVOD_ON_THREE
    one, _ = scripts_run(f"as-{ranks}", 0, names)
    made, _ = scripts_run("run", ranks, names)
    for rank in range(ranks):
        found = script_runs.differences(one / f"{name}-0.npz", made / f"{name}-{rank}.npz")
        assert sum(key.startswith("weights") for key in found) >= 2
        assert largest(name, found) == {}


def test_files_of_a_horovod_script_are_written_once_and_complete(scripts_run):
    """By rank 0: a model for each epoch, weights each second epoch, checkpoints, one log."""
    made, folder = scripts_run("run", 2, tuple(HOROVOD_RUNS))
    names = {path.name for path in folder.iterdir()}
    assert {f"mnist-{epoch}.h5" for epoch in (1, 2, 3, 4)} <= names
    assert {f"imagenet-{epoch}.h5" for epoch in range(1, 7)} <= names
    best = {name for name in names if name.startswith("advanced-")}
    assert "advanced-2.h5" in best  # the first is the best so far
    assert best <= {f"advanced-{epoch}.h5" for epoch in (2, 4, 6, 8)}
    assert (folder / "custom-loop/checkpoint").is_file()
    # `imagenet` ran twice, and its second run went on in the log of the first.
    assert len(list((folder / "imagenet-logs/train").glob("events*"))) == 2
    with h5py.File(folder / "mnist-4.h5") as file, np.load(made / "mnist-1.npz") as arrays:
        saved = file["model_weights"]
        found = [np.asarray(saved[layer][weight]) for layer in saved.attrs["layer_names"]
                 for weight in saved[layer].attrs["weight_names"]]
        expected = [arrays[key] for key in arrays.files if key.startswith("weights")]
        assert len(found) == len(expected) == 8
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_files_of_a_plain_script_are_written_once_and_complete(scripts_run):
    made, folder = scripts_run("run", 2, NAMES)
    with np.load(made / "every_callback-1.npz") as arrays:
        epochs = arrays["figures figures epochs"]
    assert len((folder / "log.csv").read_text().splitlines()) == 1 + len(epochs)
    assert len(list((folder / "logs/train").glob("events*"))) == 1
    assert {"best-callbacks.keras", "best.keras", "sequential.keras"} <= {
        path.name for path in folder.iterdir()}
