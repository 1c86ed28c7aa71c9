"""Horovod's functions on two ranks: values against NumPy, training against plain Keras.

Plain Keras trains on the batches of both ranks, one after the other. Each test asserts on values
of all ranks where one alone could differ.
"""

from functools import partial

import numpy as np
import pytest

pytestmark = pytest.mark.ranks(2)
SIZE = 2


@pytest.fixture
def sent(hvd, monkeypatch, tf):
    """What was asked of the real Horovod: kind, name, types, shapes, device, and options."""
    from hvdtrain.collectives.real_horovod import real_horovod
    calls = []

    def recorded(module, function):
        original = getattr(module, function)

        def call(tensors, *args, **options):
            several = tensors if isinstance(tensors, (list, tuple)) else [tensors]
            out = original(tensors, *args, **options)
            first = out[0] if isinstance(out, (list, tuple)) else out
            calls.append({"kind": function, "types": [t.dtype.name for t in several],
                          "shapes": [tuple(t.shape) for t in several],
                          "device": getattr(first, "device", ""), **options})
            return out
        monkeypatch.setattr(module, function, call)
    for name in ("_allreduce", "_grouped_allreduce"):
        recorded(real_horovod().ops, name)
    recorded(real_horovod().tensorflow, "allgather")
    return calls


def of_rank(rank, shape=(3, 2), dtype="f4", seed=0):
    return np.random.default_rng([seed, rank]).integers(1, 9, shape).astype(dtype)


def both_ways(tf, function, *inputs):
    """The results of a function eagerly and in a graph, which is run twice."""
    graph = tf.function(function)
    yield function(*inputs)
    yield graph(*inputs)
    yield graph(*inputs)


def reduced(arrays, op):
    stacked = np.stack(arrays)
    return {"Average": stacked.mean, "Sum": stacked.sum, "Min": stacked.min, "Max": stacked.max,
            "Product": stacked.prod}[op](0)


@pytest.mark.parametrize("op", ["Average", "Sum", "Min", "Max", "Product"])
def test_allreduce(op, hvd, tf):
    how = getattr(hvd, op)
    for kind in ("float32", "float64", "float16", "int32", "int64", "bfloat16"):
        arrays = [of_rank(r) * 2 for r in range(SIZE)]
        mine = tf.cast(arrays[hvd.rank()], kind)
        for out in both_ways(tf, lambda x: hvd.allreduce(x, op=how), mine):
            assert out.dtype == kind
            np.testing.assert_array_equal(tf.cast(out, "float32"), reduced(arrays, op))
    for out in both_ways(tf, lambda x: hvd.grouped_allreduce([x, 3 * x], op=how, name="twice"),
                         tf.constant(arrays[hvd.rank()])):
        np.testing.assert_array_equal(out[0], reduced(arrays, op))
        np.testing.assert_array_equal(out[1], reduced([3 * a for a in arrays], op))
    with pytest.raises(Exception, match="no gradient"):  # noqa: PT012
        if op in ("Average", "Sum"):
            raise RuntimeError("no gradient is refused here")
        x = tf.Variable(arrays[hvd.rank()])
        with tf.GradientTape() as tape:
            y = hvd.allreduce(x, op=how)
        tape.gradient(y, x)


def test_factors_compression_and_rows_of_allreduce(hvd, hvk, tf, sent):
    arrays = [of_rank(r) for r in range(SIZE)]
    mine = tf.constant(arrays[hvd.rank()])
    np.testing.assert_array_equal(hvd.allreduce(
        mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), 2 * sum(arrays))
    with pytest.warns(DeprecationWarning, match="op="):
        np.testing.assert_array_equal(hvd.allreduce(mine, average=False), sum(arrays))
    with pytest.raises(ValueError, match="Give op only"):
        hvd.allreduce(mine, average=False, op=hvd.Sum)
    np.testing.assert_array_equal(hvk.allreduce(arrays[hvd.rank()].tolist(), prescale_factor=2.0,
                                                op=hvd.Average), sum(arrays))
    del sent[:]
    out = hvk.allreduce(arrays[hvd.rank()].astype("f8") / 3, name="a b:0",
                        compression=hvd.Compression.fp16)
    np.testing.assert_allclose(out, sum(arrays) / 6, rtol=2e-3)
    large = hvd.allreduce(tf.fill([2], 6e4), compression=hvd.Compression.fp16)
    np.testing.assert_allclose(large, 6e4, rtol=1e-3)  # the sum is more than float16 has
    assert [c["types"] for c in sent] == [["float16"]] * 2
    assert sent[0]["name"] == "a_b_0"
    assert out.dtype == tf.float64
    slices = tf.IndexedSlices(mine, [0, hvd.rank(), 2], [5, 2])
    for op, factor in ((hvd.Sum, 1), (hvd.Average, 2)):
        found = hvd.allreduce(slices, op=op)
        np.testing.assert_array_equal(found.indices, [0, 0, 2, 0, 1, 2])
        np.testing.assert_array_equal(found.values, np.concatenate(arrays) / factor)
    dense, rows = hvd.grouped_allreduce([mine, slices], op=hvd.Sum)
    np.testing.assert_array_equal(dense, sum(arrays))
    np.testing.assert_array_equal(rows.values, np.concatenate(arrays))
    with pytest.raises(ValueError, match="Make it dense"):
        hvd.allreduce(slices, op=hvd.Max)
    with pytest.raises(ValueError, match="Adasum over MPI only"):
        hvd.allreduce(mine, op=hvd.Adasum)


def test_devices_of_operations(hvd, tf, sent):
    @tf.function
    def reduce(x):
        with tf.device("CPU:0"):
            slices = tf.IndexedSlices(x, [0, 1, 2], [5, 2])
        return (hvd.allreduce(x, device_dense="/cpu:0", op=hvd.Sum),
                hvd.allreduce(slices, device_sparse="/cpu:0").values,
                hvd.reducescatter(tf.concat([x, x], 0), device_dense="/cpu:0"))
    out = reduce(tf.ones([3, 2]))
    np.testing.assert_array_equal(out[0], np.full([3, 2], 2))
    assert out[1].shape == (6, 2)
    dense = next(c for c in sent if c["kind"] == "_allreduce")
    assert dense["device"] == "/device:CPU:0"


def test_moving_operations(hvd, hvk, tf):
    rank = hvd.rank()
    for kind in ("float32", "int64", "bool", "bfloat16", "uint32", "uint64", "uint8"):
        arrays = [of_rank(r, (r + 1, 2)) % 2 if kind == "bool" else of_rank(r, (r + 1, 2))
                  for r in range(SIZE)]
        mine = tf.cast(arrays[rank], kind)
        for out in both_ways(tf, hvd.allgather, mine):
            assert out.dtype == kind
            np.testing.assert_array_equal(tf.cast(out, "float32"), np.concatenate(arrays))
        for out in both_ways(tf, lambda x: hvd.grouped_allgather([x, x[:1]]), mine):
            np.testing.assert_array_equal(tf.cast(out[0], "float32"), np.concatenate(arrays))
            np.testing.assert_array_equal(tf.cast(out[1], "float32"),
                                          np.concatenate([a[:1] for a in arrays]))
        for out in both_ways(tf, lambda x: hvd.broadcast(x[:1], 1), mine):
            np.testing.assert_array_equal(tf.cast(out, "float32"), arrays[1][:1])
        # Rank r sends 1 - r rows to rank 0, and 2 r to rank 1.
        given = tf.cast(of_rank(rank, (1 + rank, 2)) % 2, kind)
        splits = [[1, 0], [0, 2]][rank]
        wanted = of_rank(rank, (1 + rank, 2)) % 2
        for out, counts in both_ways(tf, partial(hvd.alltoall, splits=splits), given):
            np.testing.assert_array_equal(tf.cast(out, "float32"), wanted)
            np.testing.assert_array_equal(counts, [[1, 0], [0, 2]][rank])
    for out in both_ways(tf, hvd.alltoall, tf.range(4) + 10 * rank):
        np.testing.assert_array_equal(out, [[0, 1, 10, 11], [2, 3, 12, 13]][rank])
    with pytest.raises(ValueError, match="Give splits"):
        hvd.alltoall(tf.range(3))
    with pytest.raises(ValueError, match="root_rank=2"):
        hvd.broadcast(tf.range(3), 2)
    np.testing.assert_array_equal(hvk.allgather([rank]), [0, 1])
    np.testing.assert_array_equal(hvk.broadcast([rank], 1), [1])


def test_reducescatter(hvd, hvk, tf):
    rank = hvd.rank()
    for rows in (4, 5):
        arrays = [of_rank(r, (rows, 2)) for r in range(SIZE)]
        mine, own = tf.constant(arrays[rank]), np.array_split(sum(arrays), SIZE)[rank]
        for out in both_ways(tf, lambda x: hvd.reducescatter(
                x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0), mine):
            np.testing.assert_array_equal(out, 6 * own)
        for out in both_ways(tf, lambda x: hvd.grouped_reducescatter(
                [x, 2 * x], compression=hvd.Compression.fp16), mine):
            np.testing.assert_array_equal(out[0], own / 2)
            np.testing.assert_array_equal(out[1], own)
        np.testing.assert_array_equal(hvk.reducescatter(arrays[rank], op=hvd.Sum), own)
    assert hvd.grouped_reducescatter([]) == []


def test_gradients(hvd, tf):
    rank = hvd.rank()
    x = tf.Variable(of_rank(rank))
    weights = [of_rank(r, (6, 2), seed=1) for r in range(SIZE)]
    total, mean = sum(weights), sum(weights) / SIZE
    cases = {
        "sum": (lambda v: hvd.allreduce(v, op=hvd.Sum, prescale_factor=2.0), 3, 2 * total[:3]),
        "average": (hvd.allreduce, 3, mean[:3]),
        "allgather": (hvd.allgather, 6, mean[3 * rank:3 * rank + 3]),
        "grouped": (lambda v: hvd.grouped_allgather([v, v])[1], 6, mean[3 * rank:3 * rank + 3]),
        "broadcast": (lambda v: hvd.broadcast(v, 1), 3, mean[:3] if rank else 0 * mean[:3]),
        "alltoall": (lambda v: hvd.alltoall(v, splits=[[1, 2], [2, 1]][rank])[0], 3, np.concatenate(
            [weights[0][:1], weights[1][:2]] if rank == 0 else
            [weights[0][1:3], weights[1][2:3]])),
        "scatter": (lambda v: hvd.reducescatter(v, op=hvd.Sum), [2, 1][rank], np.concatenate(
            [weights[0][:2], weights[1][:1]]) * 2),
    }
    for name, (operation, rows, expected) in cases.items():
        def gradient(operation=operation, rows=rows):
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(operation(x) * weights[rank][:rows])
            return tape.gradient(y, x)
        for found in both_ways(tf, gradient):
            np.testing.assert_allclose(found, expected, err_msg=name)


def test_constants_are_sent_each_time(hvd, tf):
    """A rank that traces again meets one that does not: nothing was folded."""
    def call():
        return (hvd.allreduce(tf.constant(1.0), op=hvd.Sum), hvd.allgather(tf.constant([1, 2])),
                hvd.alltoall(tf.constant([1, 2])), hvd.broadcast(tf.constant(True), 0),
                hvd.reducescatter(tf.constant([1.0, 2.0]), op=hvd.Sum))
    first = tf.function(call)
    for _ in range(2):
        first()
        mine = first if hvd.rank() == 0 else tf.function(call)
        out = mine()
        assert float(out[0]) == 2
        np.testing.assert_array_equal(out[1], [1, 2, 1, 2])
        np.testing.assert_array_equal(out[4], [[2.0, 4.0][hvd.rank()]])


def test_join(hvd, tf):
    """More than once in a process."""
    for last in (0, 1, 0):
        steps = 3 if hvd.rank() == last else 1
        found = [float(hvd.allreduce(tf.constant(6.0), name="step")) for _ in range(steps)]
        assert found == [6.0, 3.0, 3.0][:steps]
        assert int(hvd.join()) == last
    with pytest.raises(ValueError, match="within a tf.function"):
        tf.function(hvd.join)()


def graph_of(tf, hvd, variables):
    return tf.function(lambda: hvd.broadcast_variables(variables, root_rank=1))


def test_broadcast_of_variables(hvd, keras, tf):
    rank = hvd.rank()

    def variables(r):
        return [keras.Variable(of_rank(r)), tf.Variable(of_rank(r, dtype="i8")),
                keras.Variable(of_rank(r), dtype="bfloat16"), tf.Variable(bool(r)),
                tf.Variable(of_rank(r, (70_000,), "f8"))]
    wanted = [np.asarray(tf.cast(v, "float64")) for v in variables(1)]
    for how in ("eager", "inplace", "graph", "broadcast_"):
        mine = variables(rank)
        if how == "graph":
            graph = graph_of(tf, hvd, mine)
            graph()
            mine[0].assign(mine[0] + rank)
            wanted[0] = wanted[0] + 1
            graph()
        elif how == "broadcast_":
            values = hvd.broadcast_(mine, 1, name="all")
            np.testing.assert_array_equal(values[1], wanted[1])
        else:
            hvd.broadcast_variables(mine, root_rank=1, inplace=how == "inplace")
        for found, value in zip(mine, wanted, strict=True):
            np.testing.assert_array_equal(tf.cast(found, "float64"), value, err_msg=how)
        wanted[0] = np.asarray(tf.cast(variables(1)[0], "float64"))
    with pytest.raises(Exception, match="rank 1 has 2"):
        hvd.broadcast_variables(variables(0)[:1 + rank], root_rank=0)
    with pytest.raises(ValueError, match=r"hvd\.broadcast_variables\(model.variables"):
        hvd.broadcast_global_variables(0)


def test_objects(hvd):
    rank = hvd.rank()
    assert hvd.broadcast_object({"rank": rank, "of": {1, 2}}, root_rank=1) == {
        "rank": 1, "of": {1, 2}}
    assert hvd.broadcast_object_fn(root_rank=1)(str(rank)) == "1"
    assert hvd.allgather_object(("rank", rank), name="any") == [("rank", 0), ("rank", 1)]


def test_ranks_and_what_was_built(hvd, rank_session, tf):
    world = rank_session.world
    assert hvd.is_initialized()
    assert hvd.mpi_threads_supported() == hvd.mpi_enabled() == False  # noqa: E712
    assert hvd.gloo_enabled()
    assert hvd.is_homogeneous()
    assert [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(),
            hvd.cross_size()] == [world.rank, 2, world.local_rank, 2, 0, 1]
    graph = tf.function(lambda: (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(),
                                 hvd.local_size_op(), hvd.process_set_included_op()))
    assert [int(x) for x in graph()] == [world.rank, 2, world.local_rank, 2, 1]
    assert int(hvd.process_set_included_op(7)) == -3
    with pytest.raises(ValueError, match="no process set with the number 7"):
        hvd.size_op(7)
    from hvdtrain.collectives.real_horovod import real_horovod
    real = real_horovod().tensorflow
    for name in ("mpi_built", "gloo_built", "nccl_built", "ddl_built", "ccl_built", "cuda_built",
                 "rocm_built"):
        assert getattr(hvd, name)() == getattr(real, name)(), name
    assert hvd.global_process_set.ranks == [0, 1]
    assert (hvd.global_process_set.size(), hvd.global_process_set.rank()) == (2, world.rank)
    hvd.init([0, 1])
    with pytest.raises(ValueError, match="must mean all 2 ranks"):
        hvd.init(comm=[0])
    with pytest.raises(ValueError, match="Give all process sets to the first"):
        hvd.init(process_sets=[hvd.ProcessSet([1])])
    with pytest.raises(Exception, match="process_sets=.dynamic."):
        hvd.add_process_set([1])
    hvd.barrier()
    with pytest.raises(ValueError, match="within a tf.function"):
        tf.function(hvd.barrier)()


# --- gradients -----------------------------------------------------------------------------------


def data(rank=None, n=16):
    """Samples of one rank, or of both, whose batches of 4 stand behind each other."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(SIZE, n, 3)).astype("f4")
    y = x.sum(2, keepdims=True) ** 2
    if rank is not None:
        return x[rank], y[rank]
    return tuple(np.concatenate([a[r, i:i + 4] for i in range(0, n, 4) for r in range(SIZE)])
                 for a in (x, y))


def network(keras):
    keras.utils.set_random_seed(5)
    return keras.Sequential([
        keras.Input((3,)), keras.layers.Dense(4, activation="tanh", name="first"),
        keras.layers.Dense(1, name="second")])


def trained(model, optimizer, rank=None, **given):
    import hvdtrain
    model.compile(optimizer, "mse")
    x, y = data(rank)
    how = {"batch_size": 4 if rank is not None else 8, "epochs": 2, "shuffle": False,
           "verbose": 0, **given}
    if rank is None:
        with hvdtrain.alone():
            model.fit(x, y, **how)
    else:
        model.fit(x, y, **how)
    return model


def assert_like(ours, plain, atol=1e-6):
    for a, b in zip(ours.weights, plain.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=atol, err_msg=a.path)


def sgd(keras, rate=0.05, **options):
    return keras.optimizers.SGD(rate, **options)


PLAIN = {  # arguments -> the optimizer of one process with the same result
    "average": ({}, {"rate": 0.05}),
    "sum": ({"op": "Sum"}, {"rate": 0.1}),
    "predivide": ({"gradient_predivide_factor": 4.0}, {"rate": 0.05}),
    "groups": ({"groups": 2}, {"rate": 0.05}),
    "two passes": ({"backward_passes_per_step": 2, "average_aggregated_gradients": True},
                   {"rate": 0.05, "gradient_accumulation_steps": 2}),
    "sum of two passes": ({"backward_passes_per_step": 2},
                          {"rate": 0.1, "gradient_accumulation_steps": 2}),
    "sum of two passes and ranks": ({"backward_passes_per_step": 2, "op": "Sum"},
                                    {"rate": 0.2, "gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize("case", PLAIN)
def test_the_optimizer_trains_as_plain_keras(case, hvd, hvk, keras):
    given, plain = PLAIN[case]
    given = {**given, **({"op": hvd.Sum} if "op" in given else {})}
    optimizer = sgd(keras)
    assert hvk.DistributedOptimizer(optimizer, **given) is optimizer
    ours = trained(network(keras), optimizer, hvd.rank())
    assert_like(ours, trained(network(keras), sgd(keras, **plain)))


def test_the_sum_of_passes_is_clipped_once_it_is_applied(hvd, hvk, keras):
    clip = {"clipnorm": 0.05, "momentum": 0.9}
    ours = trained(network(keras), hvk.DistributedOptimizer(
        sgd(keras, **clip), backward_passes_per_step=2), hvd.rank())
    plain = network(keras)
    plain.compile(sgd(keras, **clip), lambda y, p: 2 * keras.losses.mean_squared_error(y, p))
    x, y = data()
    import hvdtrain
    with hvdtrain.alone():  # two batches of both ranks at once, and twice their mean
        plain.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert_like(ours, plain)


def test_what_is_sent_follows_the_arguments(hvd, hvk, keras, tf, sent):
    def step(table=False, **given):
        del sent[:]
        model = network(keras) if not table else keras.Sequential(
            [keras.Input((2,), dtype="int32"), keras.layers.Embedding(40_000, 8),
             keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile(hvk.DistributedOptimizer(sgd(keras), **given), "mse")
        x, y = data(hvd.rank())
        model.fit(np.abs(x[:4, :2] * 9).astype("i4") if table else x[:4], y[:4], verbose=0,
                  callbacks=[hvk.callbacks.BroadcastGlobalVariablesCallback(0)])
        return [c for c in sent if "opt" in c["name"]]

    assert [len(c["shapes"]) for c in step()] == [4]
    assert {c["name"].split(".")[0] for c in step(name="mine")} == {"mine"}
    assert {t for c in step(compression=hvd.Compression.fp16) for t in c["types"]} == {"float16"}
    assert [len(c["shapes"]) for c in step(groups=3)] == [2, 1, 1]
    with pytest.warns(DeprecationWarning, match="groups"):
        assert [len(c["shapes"]) for c in step(num_groups=1)] == [4]
    assert [c["device"] for c in step(device_dense="/cpu:0")] == ["/device:CPU:0"]
    assert [c["device"] for c in step()] == [""]
    factors = [c.get("prescale_factor", 1.0) for c in step(gradient_predivide_factor=2.0)]
    assert factors == [1.0]  # the division is TensorFlow's, before the sum
    by_rows = step(table=True, device_sparse="/cpu:0")
    assert [c["kind"] for c in by_rows].count("allgather") == 2
    assert {c["device"] for c in by_rows if c["kind"] == "allgather"} == {"/device:CPU:0"}
    whole = step(table=True, sparse_as_dense=True)
    assert "allgather" not in [c["kind"] for c in whole]
    assert (40_000, 8) in [shape for c in whole for shape in c["shapes"]]
    model = network(keras)
    first, second = model.layers
    chosen = hvk.DistributedOptimizer(sgd(keras), groups=[[second.kernel, first.kernel]])
    del sent[:]
    trained(model, chosen, hvd.rank(), epochs=1)
    shapes = [c["shapes"] for c in sent if "opt" in c["name"]]
    assert sorted(map(len, shapes)) == [1, 1, 2]
    assert {(3, 4), (4, 1)} == set(max(shapes, key=len))


@pytest.mark.parametrize("scale", [True, False])
def test_local_layers_stay_on_each_rank(scale, hvd, hvk, keras, tf):
    rank, start = hvd.rank(), [w.copy() for w in network(keras).get_weights()]
    x, y = data(rank, 4)

    def gradients(x, y):
        model = network(keras)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        return [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]
    own, both = gradients(x, y), gradients(*data(None, 4))
    factor = SIZE if scale else 1
    wanted = [w - 0.1 * (own[i] / factor if i < 2 else both[i]) for i, w in enumerate(start)]

    def assert_ours(model):
        for found, value in zip(model.get_weights(), wanted, strict=True):
            np.testing.assert_allclose(found, value, atol=1e-6)
    for way in ("layers", "one by one"):
        model = network(keras)
        if way == "layers":
            optimizer = hvk.PartialDistributedOptimizer(
                sgd(keras, 0.1), local_layers=model.layers[0], scale_local_gradients=scale)
        else:
            optimizer = hvk.DistributedOptimizer(sgd(keras, 0.1), scale_local_gradients=scale)
            for variable in model.layers[0].trainable_weights:
                optimizer.register_local_var(variable)
        model.compile(optimizer, "mse")
        model.fit(x, y, batch_size=4, verbose=0)
        assert_ours(model)
        model.fit(x, y, batch_size=4, verbose=0)  # other local weights are no mistake
        model = network(keras)
        with tf.GradientTape() as plain:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        tape = (hvd.PartialDistributedGradientTape(
            plain, local_layers=[model.layers[0]], scale_local_gradients=scale)
            if way == "layers" else hvd.DistributedGradientTape(
                plain, scale_local_gradients=scale))
        if way != "layers":
            for variable in model.layers[0].trainable_weights:
                tape.register_local_source(variable)
        local, shared = tape.get_local_and_global_gradients(loss, model.trainable_variables)
        assert [v.path for v, _ in local + shared] == [v.path for v in model.trainable_variables]
        assert len(local) == 2
        sgd(keras, 0.1).apply_gradients([(g, v) for v, g in local + shared])
        assert_ours(model)
    with pytest.raises(ValueError, match="must be Keras layers"):
        hvk.PartialDistributedOptimizer(sgd(keras), local_layers=["first"])


def test_arguments_of_the_tape(hvd, keras, tf, sent):
    rank = hvd.rank()
    x, y = data(rank, 4)

    def gradients(**given):
        """Of the script in Horovod's documentation: the tape is wrapped once it has recorded."""
        model = network(keras)

        @tf.function
        def step(first):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            tape = hvd.DistributedGradientTape(tape, **given)
            found = tape.gradient(loss, model.trainable_variables, use_generic_names=True)
            if first:
                hvd.broadcast_variables(model.variables, root_rank=0)
            return found
        step(True)
        del sent[:]
        return [g.numpy() for g in step(False)]
    model = network(keras)
    with tf.GradientTape() as tape:
        a, b = data(None, 4)
        loss = tf.reduce_mean(tf.square(model(a) - b))
    mean = [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]
    for given, factor in (({}, 1), ({"op": hvd.Sum}, 2), ({"gradient_predivide_factor": 8.0}, 1)):
        for found, value in zip(gradients(**given), mean, strict=True):
            np.testing.assert_allclose(found, factor * value, rtol=1e-5)
    gradients(groups=4)
    assert [len(c["shapes"]) for c in sent] == [1] * 4
    gradients(compression=hvd.Compression.fp16, device_dense="/cpu:0")
    assert {c["device"] for c in sent} == {"/device:CPU:0"}
    assert {t for c in sent for t in c["types"]} == {"float16"}


def test_arguments_that_are_not_possible(hvd, hvk, keras, tf):
    class Other(hvd.Compression.none):
        pass
    for given, text in (({"op": hvd.Max}, "Average, hvd.Sum"), ({"compression": Other}, "bf16"),
                        ({"groups": -1}, "number of groups"),
                        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "splits an average"),
                        ({"backward_passes_per_step": 0}, "1 or more")):
        with pytest.raises(ValueError, match=text):
            hvk.DistributedOptimizer(sgd(keras), **given)
    with pytest.raises(Exception, match="Adasum over MPI only"):
        hvk.DistributedOptimizer(sgd(keras), op=hvd.Adasum)
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=3.*=2\)"):
        hvk.DistributedOptimizer(sgd(keras, gradient_accumulation_steps=3),
                                 backward_passes_per_step=2)
    built = sgd(keras)
    built.build(network(keras).trainable_variables)
    with pytest.raises(ValueError, match="is built already"):
        hvk.DistributedOptimizer(built, backward_passes_per_step=2)
    with pytest.raises(ValueError, match="keras.optimizers.Adam"):
        hvd.DistributedOptimizer(tf.compat.v1.train.AdamOptimizer())
    with pytest.raises(ValueError, match="is not known to Horovod"):
        hvk.DistributedOptimizer(sgd(keras), process_set=hvd.ProcessSet([0]))
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)
    with pytest.raises(ValueError, match="legacy"):
        hvk.load_model("any.keras", legacy_opts=True)


def test_batch_normalization_over_ranks(hvd, keras, tf):
    def normalized(layer, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(layer(x, training=True) ** 3)
        return tape.gradient(y, x), layer
    x, _ = data(hvd.rank(), 8)
    both = np.concatenate([data(r, 8)[0] for r in range(SIZE)])
    ours, layer = normalized(hvd.SyncBatchNormalization(name="ours"), tf.constant(x))
    plain, expected = normalized(keras.layers.BatchNormalization(), tf.constant(both))
    np.testing.assert_allclose(ours, plain[8 * hvd.rank():8 * hvd.rank() + 8], atol=1e-5)
    np.testing.assert_allclose(layer.moving_variance, expected.moving_variance, rtol=1e-5)
    copy = type(layer).from_config(layer.get_config())
    assert copy.name == "ours"


@pytest.mark.ranks(2, collective="horovod-mpi")
def test_over_mpi(hvd, hvk, keras, tf):
    """Adasum adds what is orthogonal, and averages what is parallel."""
    from mpi4py import MPI
    hvd.init(comm=MPI.COMM_WORLD)
    with pytest.raises(ValueError, match="a communicator of 1 processes"):
        hvd.init(comm=MPI.COMM_SELF)
    assert hvd.mpi_enabled()
    assert not hvd.gloo_enabled()
    assert hvd.mpi_threads_supported()
    own = tf.constant([[1.0, 0.0], [0.0, 3.0]][hvd.rank()])
    for out in both_ways(tf, lambda x: hvd.allreduce(x, op=hvd.Adasum), own):
        np.testing.assert_allclose(out, [1.0, 3.0], atol=1e-6)
    out = hvd.grouped_allreduce([own, tf.ones([2])], op=hvd.Adasum)
    np.testing.assert_allclose(out[1], [1.0, 1.0], atol=1e-6)
    variable = keras.Variable([0.0, 0.0])
    optimizer = hvk.DistributedOptimizer(sgd(keras, 1.0), op=hvd.Adasum)
    optimizer.build([variable])
    optimizer.apply([own], [variable])
    np.testing.assert_allclose(variable.numpy(), [-1.0, -3.0], atol=1e-6)
    np.testing.assert_array_equal(hvd.alltoall(tf.range(2) + 10 * hvd.rank()),
                                  [hvd.rank(), 10 + hvd.rank()])
    np.testing.assert_array_equal(hvd.reducescatter(tf.constant([1.0, 2.0, 3.0]), op=hvd.Sum),
                                  [[2.0, 4.0], [6.0]][hvd.rank()])
