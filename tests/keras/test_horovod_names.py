"""Every public name of Horovod 0.28.1 is in ours, with its parameters, and on the docs page.

And what Horovod's functions do on one rank.
"""

import importlib
import inspect
import re
import types
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.horovod_check import check_horovod

PAGE = Path(__file__).resolve().parents[2] / "docs/horovod-names.md"
MODULES = ("tensorflow", "tensorflow.keras", "keras", "tensorflow.elastic",
           "tensorflow.keras.callbacks", "tensorflow.keras.elastic", "keras.callbacks",
           "keras.elastic")
needs_horovod = pytest.mark.skipif(not check_horovod().ok, reason="Horovod is not installed")


@pytest.fixture
def tf():
    return pytest.importorskip("tensorflow")


@pytest.fixture
def keras():
    return pytest.importorskip("keras")


def pair(name):
    return (importlib.import_module(f"horovod.{name}"),
            importlib.import_module(f"hvdtrain.{name}"))


def public(module):
    return {name: value for name, value in vars(module).items()
            if not name.startswith("_") and not isinstance(value, types.ModuleType)}


def rows():
    """The tables of the page: name -> what is said of it."""
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")]
             for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {name: said for first, said, *_ in cells for name in re.findall(r"`(\w+)", first)}


@needs_horovod
@pytest.mark.parametrize("name", MODULES)
def test_each_public_name_is_here_with_its_parameters(name):
    real, ours = pair(name)
    told = rows()
    for key, theirs in public(real).items():
        assert key in told, f"{PAGE.name} does not tell of {key}"
        if told[key].startswith("not possible"):
            assert not hasattr(ours, key) or key == "broadcast_global_variables"
            continue
        mine = getattr(ours, key)
        if isinstance(theirs, int):
            assert mine == theirs, key
        if callable(theirs):
            compare_parameters(key, theirs, mine)
        if inspect.isclass(theirs):
            for method, value in vars(theirs).items():
                if not method.startswith("_") and callable(value):
                    compare_parameters(f"{key}.{method}", value, getattr(mine, method))


def compare_parameters(name, theirs, mine):
    try:
        wanted = inspect.signature(theirs).parameters
    except ValueError:  # of a class without an `__init__` of its own
        return
    found = inspect.signature(mine).parameters
    if any(p.kind is p.VAR_POSITIONAL for p in wanted.values()) and name != "check_extension":
        return  # such as init(*args, **kwargs)
    plain = [key for key, p in wanted.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    assert [key for key in found if key in plain] == plain, name
    needed = {key for key, p in found.items() if p.default is p.empty
              and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    assert needed <= {key for key in plain if wanted[key].default is inspect.Parameter.empty}, name


def test_the_page_tells_of_each_name_that_is_here():
    told = rows()
    for name in MODULES:
        ours = importlib.import_module(f"hvdtrain.{name}")
        assert set(getattr(ours, "__all__", None) or public(ours)) <= set(told), name
    assert all(re.match(r"(same|better|not possible)\b", said) for said in told.values())
    assert "PartialDistributedOptimizer" in told


def test_packages_are_found_lazily():
    import hvdtrain
    assert hvdtrain.keras.callbacks is importlib.import_module("hvdtrain.keras.callbacks")
    assert hvdtrain.tensorflow.elastic is importlib.import_module("hvdtrain.tensorflow.elastic")
    assert hvdtrain.elastic is importlib.import_module("hvdtrain.elastic")
    assert not {"elastic", "keras", "tensorflow"} & set(hvdtrain.__all__)


def test_before_init_an_error_says_what_to_call(monkeypatch):
    import keras
    import tensorflow as tf

    import hvdtrain.keras as hvk
    import hvdtrain.tensorflow as hvd
    from hvdtrain import session
    from hvdtrain.errors import HvdtrainError
    monkeypatch.setattr(session, "_current", [])
    assert not hvd.is_initialized()
    assert not hvd.mpi_enabled()
    assert hvd.gloo_built() == check_horovod().gloo
    x, variable = tf.constant([1.0]), keras.Variable([1.0])
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank,
                 hvd.cross_size, hvd.is_homogeneous, hvd.mpi_threads_supported, hvd.rank_op,
                 hvd.size_op, hvd.join, hvd.barrier, hvd.global_process_set.size,
                 hvd.global_process_set.included, hvd.stop_timeline,
                 lambda: hvd.start_timeline("file"), lambda: hvd.allreduce(x),
                 lambda: hvd.grouped_allreduce([x]), lambda: hvd.allgather(x),
                 lambda: hvd.broadcast(x, 0), lambda: hvd.alltoall(x),
                 lambda: hvd.reducescatter(x), lambda: hvd.broadcast_variables([variable], 0),
                 lambda: hvd.broadcast_object(1), lambda: hvd.allgather_object(1),
                 lambda: hvd.add_process_set([0]), lambda: hvk.allreduce(1.0),
                 lambda: hvk.DistributedOptimizer(keras.optimizers.SGD()),
                 lambda: hvd.DistributedGradientTape(tf.GradientTape()),
                 lambda: hvd.SyncBatchNormalization().build((None, 2)),
                 hvd.elastic.run(lambda state: None).__get__(hvd.elastic.ObjectState())):
        with pytest.raises(HvdtrainError, match=r"hvd\.init\(\)") as caught:
            call()
        assert isinstance(caught.value, ValueError)


@pytest.fixture
def hvd():
    import hvdtrain.tensorflow as module
    module.init()
    return module


def test_operations_on_one_rank(hvd, tf):
    x = tf.constant([[1.0], [2.0]])
    assert (hvd.rank(), hvd.size(), hvd.cross_size()) == (0, 1, 1)
    np.testing.assert_array_equal(
        hvd.allreduce(x, prescale_factor=2.0, postscale_factor=3.0), 6 * x)
    np.testing.assert_array_equal(hvd.allreduce(tf.constant([3]), op=hvd.Sum), [3])
    np.testing.assert_array_equal(hvd.allgather(x), x)
    np.testing.assert_array_equal(hvd.broadcast(x, 0), x)
    np.testing.assert_array_equal(hvd.alltoall(x), x)
    np.testing.assert_array_equal(hvd.alltoall(x, splits=[2])[1], [2])
    np.testing.assert_array_equal(hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0), 2 * x)
    slices = hvd.allreduce(tf.IndexedSlices(x, [0, 2], [3, 1]), op=hvd.Average)
    np.testing.assert_array_equal(slices.values, x)
    np.testing.assert_array_equal(hvd.allreduce(x, op=hvd.Adasum), x)
    variable = tf.Variable(x)
    hvd.broadcast_variables([variable], root_rank=0)
    tf.function(lambda: hvd.broadcast_variables([variable], root_rank=0))()
    np.testing.assert_array_equal(variable, x)
    assert hvd.broadcast_object("a") == "a"
    assert hvd.allgather_object("a") == ["a"]
    assert int(hvd.join()) == 0
    hvd.barrier()
    assert [int(t) for t in (hvd.rank_op(), hvd.size_op(), hvd.process_set_included_op())] == [
        0, 1, 1]
    with pytest.raises(ValueError, match="duplicate of that of all ranks"):
        hvd.add_process_set([0])
    with pytest.raises(ValueError, match="from 0 to 0"):
        hvd.init(process_sets=[hvd.ProcessSet([0, 1])])
    with pytest.raises(ValueError, match="list of ranks"):
        hvd.ProcessSet(3)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert str(hvd.ProcessSet([1, 0])) == "ProcessSet(process_set_id=None, ranks=[0, 1])"


def test_training_on_one_rank_is_that_of_keras(hvd, keras):
    import hvdtrain.tensorflow.keras as hvk
    x = np.random.default_rng(0).normal(size=(32, 3)).astype("f4")

    def trained(optimizer, *callbacks):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2),
                                  keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model.compile(optimizer, "mse", metrics=["mae"])
        return model, model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=list(callbacks))
    plain, expected = trained(keras.optimizers.SGD(0.2, gradient_accumulation_steps=2))
    ours, history = trained(
        hvk.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2),
        hvk.callbacks.BroadcastGlobalVariablesCallback(0), hvk.callbacks.MetricAverageCallback(),
        hvk.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1))
    for a, b in zip(ours.weights, plain.weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert history.history["mae"] == pytest.approx(expected.history["mae"])
    assert history.history["lr"] == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("variant", ["tensorflow", "keras", "partial"])
def test_each_variant_of_the_optimizer_passes_all_arguments_on(variant, hvd, keras):
    import hvdtrain.keras as hvk
    from hvdtrain.optim import ReducerOptions
    from hvdtrain.optim.distributed import state_of
    make = {"tensorflow": hvd.DistributedOptimizer, "keras": hvk.DistributedOptimizer,
            "partial": hvk.PartialDistributedOptimizer}[variant]
    optimizer = make(
        keras.optimizers.SGD(), name="mine", device_dense="/cpu:0", device_sparse="/cpu:1",
        compression=hvd.Compression.fp16, sparse_as_dense=True, backward_passes_per_step=3,
        gradient_predivide_factor=2.0, groups=2, scale_local_gradients=False)
    found = state_of(optimizer)
    assert found.name.startswith("mine.")
    assert optimizer.gradient_accumulation_steps == 3
    assert found.options == ReducerOptions(
        device_dense="/cpu:0", device_sparse="/cpu:1", compression="fp16", sparse="dense",
        factor=3.0, predivide=2.0, groups=2)
    optimizer = make(keras.optimizers.SGD(), op=hvd.Sum, backward_passes_per_step=3,
                     average_aggregated_gradients=True)
    assert state_of(optimizer).options == ReducerOptions(op="sum", scale_local=True)
    assert make(optimizer, op=hvd.Sum, backward_passes_per_step=3,
                average_aggregated_gradients=True) is optimizer  # again, with the same
    with pytest.raises(Exception, match="is distributed already"):
        make(optimizer)
    with pytest.warns(DeprecationWarning, match="groups"):
        optimizer = make(keras.optimizers.SGD(), num_groups=4)
    assert state_of(optimizer).options.groups == 4


def test_a_used_tensorflow_is_a_warning_on_cpus_only(monkeypatch, caplog):
    import tensorflow as tf

    from hvdtrain.errors import DeviceError
    from hvdtrain.train import devices
    from hvdtrain.world import World
    world = World(rank=0, size=1, local_rank=0, local_size=1, host="a", starter="single",
                  rendezvous="none")

    def refuse(_):
        raise RuntimeError("too late")
    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", refuse)
    assert devices.pin(world, {}, late=True).gpu is None
    with pytest.raises(DeviceError):
        devices.pin(world, {})


@needs_horovod
def test_the_real_horovod_is_found_behind_other_modules(monkeypatch):
    """As `hvdtrain run` puts ours in the place of Horovod's."""
    import sys

    import hvdtrain.tensorflow
    from hvdtrain.collectives.real_horovod import real_horovod
    real = real_horovod()
    monkeypatch.setitem(sys.modules, "horovod", hvdtrain)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", hvdtrain.tensorflow)
    assert real_horovod() is real
    assert real.tensorflow.__name__ == "horovod.tensorflow"
    program = """
import sys, types
for name in ("horovod", "horovod.tensorflow", "horovod.keras"):
    sys.modules[name] = types.ModuleType("hvdtrain." + name)
before = dict(sys.modules)
from hvdtrain.collectives.real_horovod import real_horovod
real = real_horovod()
assert real.ops.MPI_LIB and real.process_sets.ProcessSet and real.tensorflow.allreduce
assert {n: m for n, m in sys.modules.items() if n.split(".")[0] == "horovod"} == {
    n: m for n, m in before.items() if n.split(".")[0] == "horovod"}
real.tensorflow.init()
assert real.tensorflow.size() == 1
assert real_horovod() is real
"""
    import os
    import subprocess
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "OMPI_"))}
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True,
                          env=environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}, check=False)
    assert done.returncode == 0, done.stderr
