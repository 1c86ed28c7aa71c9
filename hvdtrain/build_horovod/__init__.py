"""Builds Horovod for the TensorFlow that is installed; TensorFlow is never imported here."""

from hvdtrain.build_horovod.build import build_horovod, plan_key
from hvdtrain.build_horovod.key import RECIPE
from hvdtrain.build_horovod.options import BuildOptions, BuildResult

__all__ = ["RECIPE", "BuildOptions", "BuildResult", "build_horovod", "plan_key"]
