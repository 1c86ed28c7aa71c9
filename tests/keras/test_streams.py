"""Streams in one process."""

import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.data.stream import stream_dataset
from hvdtrain.data.stream_plan import StreamPlan


@pytest.mark.parametrize("counts", [(9, 12), (12, 9), (9, 9), (8, 8)])
def test_a_stream_that_changes_is_noticed_before_its_epoch_ends(counts):
    """Also in the last epoch, when nobody asks for the next one."""
    own = counts[0]
    length = [own]
    source = hvdtrain.StreamSource(lambda rank, size: iter(np.arange(length[0])))
    plan = StreamPlan(counts=counts, rank=0, batch_per_rank=4)
    full = [list(range(own))[i:i + 4] or [0] for i in range(0, 4 * plan.steps, 4)]
    for first_step in (0, plan.steps - 1):
        steps = stream_dataset(source, plan, first_step=first_step).take(plan.steps - first_step)
        found = [one[1] if plan.uneven else one for one in steps.as_numpy_iterator()]
        assert [batch.tolist() for batch in found] == full[first_step:]
        for change in (-1, 1, 5):
            length[0] = own + change
            with pytest.raises(tf.errors.InvalidArgumentError, match="the stream changed"):
                list(steps)
        length[0] = own
