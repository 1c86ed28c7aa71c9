"""Settings of TensorFlow's devices and threads in a script, after hvdtrain has started TensorFlow.

TensorFlow takes them only before its first operation. hvdtrain has pinned this rank's GPU and
divided the cores by then, which is what a script on several ranks would ask for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import tensorflow as tf

from hvdtrain.log import get_logger
from hvdtrain.script.inside import replace_attribute

_SETTERS = (
    (tf.config, "set_visible_devices"),
    (tf.config, "set_logical_device_configuration"),
    (tf.config.experimental, "set_visible_devices"),
    (tf.config.experimental, "set_memory_growth"),
    (tf.config.experimental, "set_virtual_device_configuration"),
    (tf.config.threading, "set_inter_op_parallelism_threads"),
    (tf.config.threading, "set_intra_op_parallelism_threads"),
)


def install() -> Callable[[], None]:
    """Let settings that come too late pass with a line; gives a function that undoes it."""
    told: set[str] = set()

    def late(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def setter(*args: Any, **kwargs: Any) -> None:
            try:
                original(*args, **kwargs)
            except RuntimeError as error:
                if "initialized" not in str(error):
                    raise
                if name not in told:
                    told.add(name)
                    get_logger().info("%s is left out: hvdtrain has set this rank's device and "
                                      "threads.", name)
        return setter
    with ExitStack() as stack:
        for module, name in _SETTERS:
            original = getattr(module, name)
            stack.callback(replace_attribute(module, name, late(f"tf.config...{name}", original)))
        return stack.pop_all().close
