"""What moves bytes between ranks, behind one small interface."""

from hvdtrain.collectives.base import Collective, ReduceOp

__all__ = ["Collective", "ReduceOp"]
