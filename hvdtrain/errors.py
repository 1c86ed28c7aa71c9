"""The error tree: what was found, what was expected, what to do.

Every error that a user can cause derives from `HvdtrainError`; the command line prints its
message without a traceback and leaves with `exit_code`. Anything else is a bug and keeps its
traceback.
"""

from typing import TYPE_CHECKING

EXIT_RUN_FAILED = 1
EXIT_USAGE = 2
EXIT_MACHINE = 3
EXIT_BUILD = 4
EXIT_STOPPED = 75
"""EX_TEMPFAIL of sysexits.h: stopped on request, to be submitted anew."""


class HvdtrainError(Exception):
    """Base of all errors that hvdtrain raises on purpose."""

    exit_code: int = EXIT_USAGE

    # TensorFlow's autograph re-raises an error of this constructor as its own type, and any
    # other as a StagingError.
    if not TYPE_CHECKING:
        __init__ = Exception.__init__


class ConfigError(HvdtrainError, ValueError):
    """A setting, job file or option is missing, unknown or out of range."""


class DataError(HvdtrainError, ValueError):
    """The training data is missing, empty or does not fit the job."""


class WorldError(HvdtrainError, RuntimeError):
    """The processes do not form the group that was promised."""


class DeviceError(HvdtrainError, RuntimeError):
    """The ranks of a host do not fit its devices."""


class CollectiveError(HvdtrainError, RuntimeError):
    """No usable collective, or a collective was used wrongly."""


class OptimizerError(HvdtrainError, RuntimeError):
    """An optimizer is not distributed, or Keras is not a version that is known."""


class TrainingError(HvdtrainError, RuntimeError):
    """Training cannot go on: a loss that is not finite, or ranks whose weights differ."""


class CheckpointError(HvdtrainError, OSError):
    """A checkpoint cannot be written or read."""


class LaunchError(HvdtrainError, RuntimeError):
    """The job cannot be started as asked."""


class BuildError(HvdtrainError, RuntimeError):
    """Building Horovod failed."""

    exit_code: int = EXIT_BUILD


class MachineError(HvdtrainError, RuntimeError):
    """This machine lacks something that building or starting needs."""

    exit_code: int = EXIT_MACHINE


class MissingExtraError(HvdtrainError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""
