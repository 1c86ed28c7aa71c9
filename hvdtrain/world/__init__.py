"""Pure functions from an environment mapping to a `World`."""

from hvdtrain.world.detect import World, detect_world, explain

__all__ = ["World", "detect_world", "explain"]
