"""Who am I: pure functions from an environment mapping to a `World`."""

from hvdtrain.world.detect import detect_world
from hvdtrain.world.explain import explain
from hvdtrain.world.world import World

__all__ = ["World", "detect_world", "explain"]
