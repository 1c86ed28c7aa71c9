"""Moved to `hvdtrain.world.network`."""

from hvdtrain.world.network import Route, interface_of, route_to

__all__ = ["Route", "interface_of", "route_to"]
