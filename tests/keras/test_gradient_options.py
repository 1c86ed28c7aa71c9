"""How gradients are reduced: what is decided, refused and asked for, without other ranks."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.collectives.single import SingleCollective
from hvdtrain.errors import CollectiveError, ConfigError, OptimizerError
from hvdtrain.optim import ReducerOptions, keras_seam
from hvdtrain.optim.compression import PowerSgd
from hvdtrain.optim.options import GradientKind, choose_way, refuse_differences
from hvdtrain.optim.reducer import GradientReducer


@pytest.fixture(autouse=True)
def fresh_keras():
    """Nothing here makes a model: there is nothing to clear."""


class SomeRanks(SingleCollective):
    """For what depends on the number of ranks only."""

    def __init__(self, size):
        self.size = size


@pytest.mark.parametrize(("values", "message"), [
    ({"sparse": "rows"}, "sparse must be one of 'auto', 'gather', 'dense'. Received: sparse='r"),
    ({"compression": "fp8"},
     "compression must be one of 'none', 'fp16', 'bf16', 'lowrank'"),
    ({"merge": "sum", "op": "min"}, "op must be one of 'average', 'sum', 'adasum'"),
    ({"bucket_bytes": 0}, "bucket_bytes must be at least 1"),
    ({"compression": "topk"}, "'topk' was removed. Use compression='lowrank'"),
    ({"approximation_rank": 0}, "approximation_rank must be at least 1"),
    ({"predivide": -1.0}, "predivide must be above 0"),
    ({"predivide": 2.0, "compression": "bf16"}, "predivide=2 has no meaning with compression"),
    ({"predivide": 2.0, "op": "sum"}, "predivide splits an average"),
    ({"merge": "none", "sparse": "dense"}, "use sparse='gather' with it"),
    ({"op": "adasum", "compression": "lowrank"}, "Adasum cannot be combined"),
    ({"op": "adasum", "sparse": "gather"}, "dense gradients only"),
])
def test_options_that_do_not_fit_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        ReducerOptions(**values)


@pytest.mark.parametrize(("chosen", "path", "local"), [
    (("expert",), "expert/kernel", True), (("expert",), "expert_2/kernel", False),
    (("expert",), "sequential/expert/kernel", True), (("expert/k",), "a/expert/kernel", False),
    (("expert/kernel",), "a/expert/kernel", True),
    ("kernel", "expert/kernel", True), (("a", "b"), "b", True), ((), "expert/kernel", False),
    (lambda v: v.trainable, "any", True)])
def test_local_variables_are_chosen_by_name_or_function(chosen, path, local):
    variable = keras.Variable([1.0])
    assert ReducerOptions(local_variables=chosen).is_local(path, variable) is local


def test_names_that_no_variable_has_are_found():
    options = ReducerOptions(local_variables=("expert", "exprt"))
    assert options.unknown_names(["a/expert/kernel", "b/kernel"]) == ["exprt"]
    assert ReducerOptions(local_variables=lambda v: True).unknown_names([]) == []


def table(ids, rows=100_000, width=64):
    return GradientKind(index=0, name="table", form="sparse", dtype="float32",
                        shape=(rows, width), ids=ids)


def choose(ids_of_ranks, options=None, rows=100_000, width=64, *, one_host=False):
    options = options or ReducerOptions()
    ranks = len(ids_of_ranks)
    compression = GradientReducer(SomeRanks(ranks), "test", options).compression
    kinds = [table(ids, rows, width) for ids in ids_of_ranks]
    return choose_way(
        kinds, options, updates_rows=True, one_host=one_host,
        value_bytes=compression.number_bytes(tf.float32),
        dense_bytes=compression.dense_bytes((rows, width), tf.float32)).way


@pytest.mark.parametrize(("ids", "rows", "way"), [
    ([640, 640], 100_000, "gather"), ([640, 320], 100_000, "gather"),
    ([500_000, 500_000], 100_000, "dense"),
    ([1500] * 2, 1000, "gather"), ([8000] * 2, 1000, "dense"),
    ([640] * 64, 2000, "dense"), ([None, None], 100_000, "gather"), ([None, 640], 100, "dense"),
    ([0, 0], 100_000, "gather")])
def test_the_rows_used_travel_where_they_are_fewer_bytes(ids, rows, way):
    assert choose(ids, rows=rows) == way


def test_within_one_host_a_gather_must_save_more():
    ids, rows = [12_800] * 2, 20_000  # half of the bytes
    assert choose(ids, rows=rows) == "gather"
    assert choose(ids, rows=rows, one_host=True) == "dense"
    assert choose([640] * 2, one_host=True) == "gather"
    assert choose([640] * 2, rows=2000) == "gather"
    assert choose([640] * 2, rows=2000, one_host=True) == "dense"


@pytest.mark.parametrize(("total_mib", "one_host", "given", "expected_mib"), [
    (18, False, None, 2.25), (0.1, False, None, 1), (2000, False, None, 32), (18, True, None, 32),
    (18, False, 5 << 20, 5), (18, True, 5 << 20, 5)])
def test_a_bucket_is_an_eighth_of_the_gradients(total_mib, one_host, given, expected_mib):
    options = ReducerOptions(bucket_bytes=given)
    assert options.bucket_for(int(total_mib * (1 << 20)), one_host=one_host) == pytest.approx(
        expected_mib * (1 << 20), rel=1e-3)


def test_what_was_asked_for_is_done():
    assert choose([9, 9], ReducerOptions(sparse="dense")) == "dense"
    assert choose([10 ** 7] * 2, ReducerOptions(sparse="gather")) == "gather"
    assert choose([10 ** 7] * 2, ReducerOptions(merge="none")) == "gather"
    # Two thin matrices for the table are fewer bytes than all rows used.
    assert choose([20_000] * 2, ReducerOptions(compression="lowrank")) == "dense"
    assert choose([500] * 2, ReducerOptions(compression="lowrank")) == "gather"


@pytest.mark.parametrize(("options", "shape"), [
    ({"compression": "lowrank"}, (1000, 1000)),
    ({"compression": "lowrank", "approximation_rank": 1000}, (1000, 1000)),
    ({"compression": "lowrank", "approximation_rank": 1000}, (3, 3, 64, 128)),
    ({"compression": "lowrank"}, (64, 128))])
def test_parts_of_gradients_are_at_most_a_twentieth_of_the_bytes(options, shape):
    for ranks in (2, 4, 16, 128):
        sent, whole = (
            GradientReducer(SomeRanks(ranks), "test", chosen).compression.dense_bytes(
                shape, tf.float32) for chosen in (ReducerOptions(**options), ReducerOptions()))
        assert 0 < sent <= 0.05 * whole, ranks


@pytest.mark.parametrize(("shape", "form"), [
    ((128, 128), (128, 128, 9)), ((1000, 1000), (1000, 1000, 16)), ((512, 8, 64), (512, 512, 16)),
    ((3, 3, 32, 64), (288, 64, 8)), ((3, 3, 256, 1), (9, 256, 4)), ((128, 10), (128, 10, 4)),
    ((1000,), (1, 1000, 0)), ((), (1, 1, 0)), ((4, 4), (4, 4, 0))])
def test_a_tensor_becomes_a_matrix_and_small_ones_travel_whole(shape, form):
    compression = PowerSgd(SomeRanks(4), ReducerOptions(compression="lowrank"))
    assert compression.form(shape) == form


@pytest.mark.parametrize(("name", "settings", "ids", "form"), [
    ("SGD", {}, 500, "sparse"), ("SGD", {}, 80_000, "dense"),
    ("SGD", {"momentum": 0.9}, 500, "dense"), ("Adam", {}, 500, "dense"),
    ("Adagrad", {}, 500, "sparse"), ("Adagrad", {}, None, "sparse")])
def test_rows_are_kept_apart_for_optimizers_that_update_rows(name, settings, ids, form):
    optimizer = getattr(keras.optimizers, name)(**settings)
    choice = choose_way([table(ids)] * 2, ReducerOptions(sparse="gather"), value_bytes=4,
                        dense_bytes=0, updates_rows=keras_seam.updates_rows(optimizer))
    assert (choice.way, choice.form) == ("gather", form)


def report(*kinds, reducer="hvdtrain.opt0", options="sparse='auto'"):
    return reducer, options, kinds


def kind(index, name="v", form="dense", dtype="float32", shape=(5, 6), ids=None):
    return GradientKind(index=index, name=name, form=form, dtype=dtype, shape=shape, ids=ids)


@pytest.mark.parametrize(("others", "message"), [
    (report(kind(0)), r"for variable 1 \(`bias`\) rank 0 has a dense float32 gradient \(6\), "
                      r"rank 2 has none"),
    (report(kind(0), kind(1, shape=(6,)), kind(3, "late")),
     r"variable 3 \(`late`\) rank 0 has none, rank 2 has a dense float32"),
    (report(kind(0, form="sparse"), kind(1, shape=(6,))), r"rank 2 has a sparse float32 gradient"),
    (report(kind(0, dtype="float16"), kind(1, shape=(6,))), "rank 2 has a dense float16"),
    (report(kind(0, shape=(5, 7)), kind(1, shape=(6,))), r"rank 2 has a dense float32 gradient "
                                                         r"\(5 x 7\)"),
    (report(kind(0), kind(1, shape=(6,)), reducer="hvdtrain.opt1"),
     "`hvdtrain.opt1` instead of `hvdtrain.opt0`"),
    (report(kind(0), kind(1, shape=(6,)), options="sparse='dense'"), "other ReducerOptions"),
])
def test_a_rank_with_other_gradients_is_named(others, message):
    mine = report(kind(0), kind(1, "bias", shape=(6,)))
    with pytest.raises(OptimizerError, match=message):
        refuse_differences([mine, mine, others])


def test_names_and_numbers_of_rows_may_differ():
    refuse_differences([report(kind(0, "dense", "sparse", ids=3)),
                        report(kind(0, "dense_1", "sparse", ids=None))])


def test_states_of_local_variables_are_not_shared():
    shared, own = keras.Variable(np.ones((2, 2)), name="a"), keras.Variable(np.ones(3), name="own")
    optimizer = hvdtrain.DistributedOptimizer(
        keras.optimizers.Adam(0.1), options=ReducerOptions(local_variables=("own",)))
    optimizer.build([shared, own])
    assert keras_seam.shared_weights(optimizer, [shared, own]) == [shared]
    names = [v.path.split("/")[-1] for v in keras_seam.shared_variables(optimizer)]
    assert names == ["iteration", "learning_rate", "a_momentum", "a_velocity"]


def test_clipping_by_a_global_norm_with_local_variables_is_refused():
    with pytest.raises(OptimizerError, match="global norm"):
        hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1, global_clipnorm=1.0),
                                      options=ReducerOptions(local_variables=("own",)))


def test_a_subset_of_ranks_that_are_not_there_is_refused():
    assert SingleCollective().subset([0]).size == 1
    for ranks in ([], [0, 0], [1], [-1]):
        with pytest.raises(CollectiveError, match="distinct ranks from 0 to 0"):
            SingleCollective().subset(ranks)


def test_repeated_rows_are_left_as_keras_leaves_them():
    """Where it is asked for; merged they are in `test_optimizer_hooks.py`."""
    tables = [keras.Variable(np.ones((4, 2), "f4")) for _ in range(2)]
    optimizers = [hvdtrain.DistributedOptimizer(keras.optimizers.Adagrad(0.1),
                                                options=ReducerOptions(merge="none")),
                  keras.optimizers.Adagrad(0.1)]
    slices = tf.IndexedSlices(tf.ones((3, 2)), tf.constant([1, 1, 3]), tf.constant([4, 2]))
    for optimizer, variable in zip(optimizers, tables, strict=True):
        optimizer.build([variable])
        optimizer.apply([slices], [variable])
    np.testing.assert_allclose(tables[0].numpy(), tables[1].numpy(), atol=1e-6)


def test_a_tape_of_one_rank_is_a_tape():
    v, w = tf.Variable([1.0, 2.0]), keras.Variable([3.0])
    with hvdtrain.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = tf.reduce_sum(v * v) * w.value[0]
    one, several = tape.gradient(loss, v), tape.gradient(loss, {"v": [v], "w": w})
    np.testing.assert_allclose(one, [6.0, 12.0])
    np.testing.assert_allclose(several["v"][0], [6.0, 12.0])
    np.testing.assert_allclose(several["w"], [5.0])
    assert tape.watched_variables()
    assert hvdtrain.broadcast_variables([v, w]) == 0
