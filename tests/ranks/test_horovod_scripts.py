"""Scripts for Horovod on three ranks: what `init` does, and process sets."""

import os
import subprocess
import sys

import pytest

from tests import preload

START = """
import os, random, sys, time
import keras, numpy as np, tensorflow as tf
import hvdtrain
import hvdtrain.tensorflow.keras as hvd
import hvdtrain.tensorflow as hvt
"""

INIT = START + """
tf.zeros([1])  # too early, and only a warning
hvd.init()
rank, size = hvd.rank(), hvd.size()
assert (size, hvd.local_size(), hvd.cross_size()) == (3, 3, 1)
everyone = hvt.allgather_object((random.random(), np.random.random(), float(tf.random.uniform([]))))
for drawn in zip(*everyone):
    assert len(set(drawn)) == 3, everyone  # each rank shuffles in its own order
session = hvdtrain.init()
assert session.collective.name == "horovod-gloo"
hvd.init()
assert hvdtrain.init() is session
assert hvd.add_process_set is hvt.add_process_set

# Uneven data: a rank without more data takes part with zeros.
found = [float(hvt.allreduce(3.0, op=hvd.Sum, name="step")) for _ in range(1 + rank)]
assert found == [9.0, 6.0, 3.0][:1 + rank], found
assert int(hvd.join()) == 2
hvd.start_timeline(f"{sys.argv[1]}-{rank}.json", mark_cycles=True)
for _ in range(20):  # Horovod begins to write in its next cycle
    hvt.allreduce(1.0)
    time.sleep(0.02)
hvd.stop_timeline()
written = open(f"{sys.argv[1]}-0.json").read()
assert "HorovodAllreduce" in written and "CYCLE_START" in written
x = np.arange(12, dtype="f4").reshape(12, 1)[rank::size]
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.001 * size)), "mse")
model.fit(x, x, batch_size=2, epochs=2, verbose=0, callbacks=[
    hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])
weights = hvt.allgather_object([w.tolist() for w in model.get_weights()])
assert weights[0] == weights[1] == weights[2]

# Where hvdtrain divides the data, all ranks need the same order.
seen = []
class Seen(keras.utils.PyDataset):
    def __len__(self):
        return 4
    def __getitem__(self, number):
        return np.full((3, 1), number, "f4"), np.full((3, 1), number, "f4")
class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
    def call(self, x):
        tf.py_function(lambda v: seen.append(float(v[0, 0])), [x], [])
        return self.dense(x)
model = Model()
model.compile("sgd", "mse")
hvdtrain.fit(model, Seen(), epochs=1, verbose=0)
orders = hvt.allgather_object(seen[-4:])
assert orders[0] == orders[1] == orders[2] and sorted(orders[0]) == [0, 1, 2, 3], orders
assert len(set(hvt.allgather_object(np.random.random()))) == 1
hvd.shutdown()
assert not hvd.is_initialized()
try:
    hvd.rank()
except ValueError as error:
    assert "hvd.init()" in str(error)
print("done", flush=True)
"""

SETS = START + """
how = sys.argv[1]
pair = hvd.ProcessSet([2, 0])
assert pair.size() is None and pair.rank() is None
if how == "at init":
    hvd.init(process_sets=[pair])
else:
    hvd.init(process_sets="dynamic")
    assert hvd.add_process_set(pair) is pair
    one = hvd.add_process_set([1])
    assert (one.size(), one.included()) == (1, hvd.rank() == 1)
rank = hvd.rank()
member = rank != 1
assert (pair.ranks, pair.size(), pair.included()) == ([0, 2], 2, member)
assert int(hvt.size_op(pair.process_set_id)) == 2
assert int(hvt.process_set_included_op(pair.process_set_id)) == member
x = tf.fill([2, 1], float(rank))
if member:
    place = [0, 2].index(rank)
    assert pair.rank() == place
    assert float(hvt.allreduce(x, process_set=pair)[0, 0]) == 1.0
    assert hvt.grouped_allreduce([x, x], op=hvd.Sum, process_set=pair)[1].numpy().max() == 2.0
    assert hvt.allgather(x, process_set=pair)[:, 0].numpy().tolist() == [0, 0, 2, 2]
    assert hvt.grouped_allgather([x], process_set=pair)[0].shape == (4, 1)
    assert float(hvt.broadcast(x, 2, process_set=pair)[0, 0]) == 2.0
    assert hvt.alltoall(x, process_set=pair)[:, 0].numpy().tolist() == [0, 2]
    assert float(hvt.reducescatter(x, op=hvd.Sum, process_set=pair)[0, 0]) == 2.0
    assert float(hvt.grouped_reducescatter([x], process_set=pair)[0][0, 0]) == 1.0
    slices = hvt.allreduce(tf.IndexedSlices(x, [0, 1], [3, 1]), process_set=pair)
    assert slices.values[:, 0].numpy().tolist() == [0, 0, 1, 1]
    assert hvt.broadcast_object(rank, 2, process_set=pair) == 2
    assert hvt.broadcast_object_fn(2, process_set=pair)(rank) == 2
    assert hvt.allgather_object(rank, process_set=pair) == [0, 2]
    v = [tf.Variable(float(rank)), keras.Variable([rank])]
    hvt.broadcast_variables(v, root_rank=2, process_set=pair)
    assert (float(v[0]), v[1].numpy().tolist()) == (2.0, [2])
    v[0].assign(rank)
    assert float(hvt.broadcast_(v[:1], 2, process_set=pair)[0]) == 2.0
    hvt.barrier(pair)
    for call in (lambda: hvt.broadcast(x, 1, process_set=pair),
                 lambda: hvt.broadcast_variables(v, 1, process_set=pair)):
        try:
            call()
        except ValueError as error:
            assert "none of the ranks [0, 2]" in str(error)
        else:
            raise AssertionError
else:
    for call in (pair.rank, lambda: hvt.allreduce(x, process_set=pair), lambda: hvt.barrier(pair),
                 lambda: hvt.broadcast_object(1, process_set=pair)):
        try:
            call()
        except ValueError as error:
            assert "Rank 1 is not in the process set [0, 2]" in str(error), error
        else:
            raise AssertionError

# The ranks of the set train together, and the other one trains alone.
def gradient(process_set):
    w = keras.Variable([0.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(w * float(rank + 1))
    tape = hvt.DistributedGradientTape(tape, process_set=process_set)
    return tape.gradient(loss, [w])[0].numpy().tolist()
assert gradient(pair) == ([2.0] if member else [2.0]), gradient(pair)
assert gradient(hvd.global_process_set) == [2.0]
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(
    1, use_bias=False, kernel_initializer="ones")])
optimizer = keras.optimizers.SGD(0.5)
model.compile(hvd.DistributedOptimizer(optimizer, process_set=pair, op=hvd.Sum),
              loss=lambda y, p: p)
data = np.full((1, 1), rank + 1.0, "f4")
if member or how == "at init":  # a rank outside of the set need not train
    model.fit(data, data, verbose=0)
expected = 1 - 0.5 * (4 if member else 2 if how == "at init" else 0)
assert float(model.get_weights()[0][0, 0]) == expected
local = hvd.PartialDistributedOptimizer(
    keras.optimizers.SGD(0.5), process_set=pair, local_layers=model.layers[0])
model.compile(local, loss=lambda y, p: p)
if member:  # a local gradient is divided by the ranks of the set
    model.fit(data, data, verbose=0)
    assert float(model.get_weights()[0][0, 0]) == expected - 0.5 * (rank + 1) / 2

def refused(call, text):
    try:
        call()
    except Exception as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
refused(lambda: hvt.add_process_set([0, 1, 2]), "duplicate of that of all ranks")
refused(lambda: hvt.add_process_set([0, 3]), "from 0 to 2")
refused(lambda: hvt.add_process_set([0, 2]), "already")
hvt.barrier()
if how == "at init":
    refused(lambda: hvt.add_process_set([0, 1]), 'process_sets="dynamic"')
else:
    assert hvt.remove_process_set(pair) and pair.process_set_id is None
    assert not hvt.remove_process_set(pair)
    refused(lambda: hvt.allreduce(x, process_set=pair), "not known to Horovod")
    again = hvt.add_process_set([0, 2])
    if member:
        assert float(hvt.allreduce(x, process_set=again)[0, 0]) == 1.0
hvt.barrier()  # a rank that ends shuts Horovod down for all
print("done", flush=True)
"""

AFTER_ANOTHER = START + """
hvdtrain.init(collective="shared-memory")
assert hvd.rank() == hvdtrain.rank()
for call in (hvd.init, lambda: hvt.allreduce(1.0)):
    try:
        call()
    except ValueError as error:
        assert 'hvdtrain.init(collective="horovod-gloo")' in str(error), error
    else:
        raise AssertionError
print("done", flush=True)
"""


@pytest.mark.parametrize(("program", "argument"), [
    (INIT, ""), (SETS, "at init"), (SETS, "dynamic"), (AFTER_ANOTHER, "")],
    ids=["init", "sets at init", "dynamic sets", "after another collective"])
def test_a_script_on_three_ranks(program, argument, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(program)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_")}
    if program is INIT:
        environ["HOROVOD_TIMELINE"], argument = "DYNAMIC", str(tmp_path / "timeline")
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "launch", "-np", "3", "--timeout", "200", "--",
         sys.executable, str(path), argument], text=True, capture_output=True, check=False,
        env=environ | preload.environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done" in done.stdout
    for told in ("threads stay as they are", "own random numbers") if program is INIT else ():
        assert told in done.stdout + done.stderr
