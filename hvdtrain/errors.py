"""The error classes, and all exit codes. A message: what was found, what was expected, what to do.

Every error that a user can cause derives from `HvdtrainError`; the command line prints its message
without a traceback and exits with `exit_code`. Anything else is a bug and keeps its traceback.
"""

from typing import TYPE_CHECKING

EXIT_RUN_FAILED = 1
"""An exception that hvdtrain does not know."""
EXIT_USAGE = 2
"""A mistake in what was typed, written or started; also used by the command line's parser."""
EXIT_MACHINE = 3
EXIT_BUILD = 4
EXIT_NOT_FINITE = 5
EXIT_RANKS_DIFFER = 6
EXIT_COLLECTIVE = 7
"""No usable collective, or one that failed because another rank has gone."""
EXIT_NOT_WRITTEN = 8
"""A file could not be written, as on a full disk."""
EXIT_STOPPED = 75
"""EX_TEMPFAIL of sysexits.h: stopped on request, to be submitted again."""
EXIT_TOO_FEW = 76
"""An elastic job had fewer ranks than `--min-np` for too long."""
EXIT_PARAMETERS_LOST = 86
"""Between processes of engine ps: the chief's asks to be restarted, for a lost server."""
EXIT_TIME_OVER = 124
"""As of `timeout`: over a limit in seconds, that of the watchdog or of `launch --timeout`."""
EXIT_NOT_STARTED = 127
"""As of a shell: a program cannot be started. Repeated in `launch/agent.py`, which is sent to other
hosts alone."""
EXIT_SIGNALLED = 128
"""Plus the number of the signal that ended a process."""
EXIT_HOST_LOST = 255
"""As of ssh: the connection to a host was lost."""


class HvdtrainError(Exception):
    """Base of all errors that hvdtrain raises on purpose."""

    exit_code: int = EXIT_USAGE
    of_another_rank: bool = False

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

    exit_code: int = EXIT_COLLECTIVE


class NotInitializedError(CollectiveError, ValueError):
    """A function of Horovod was called before `init`."""


class RankGoneError(CollectiveError):
    """Another rank has ended while this one communicates with it."""

    of_another_rank = True


class OptimizerError(HvdtrainError, RuntimeError):
    """An optimizer is not distributed, or the Keras version is not supported."""


class TrainingError(HvdtrainError, RuntimeError):
    """Training cannot continue."""


class ChiefFailedError(TrainingError):
    """Rank 0 has failed in work that it does for all ranks."""

    exit_code: int = EXIT_COLLECTIVE
    of_another_rank = True


class LeftEarlyError(TrainingError):
    """A rank was about to exit with code 0 (`sys.exit()`) while the others continue."""

    exit_code: int = EXIT_RUN_FAILED

    def __init__(self) -> None:
        super().__init__(
            "This rank was about to leave the training with code 0 (sys.exit) before its end, and "
            "the others would wait for it. To end the training on all ranks, set "
            "model.stop_training = True in a callback; to report a failure, raise an error.")


class NotFiniteError(TrainingError):
    """The loss, or a weight, is not finite."""

    exit_code: int = EXIT_NOT_FINITE


class RanksDifferError(TrainingError):
    """The ranks hold different weights, models or metrics."""

    exit_code: int = EXIT_RANKS_DIFFER


class CheckpointError(HvdtrainError, OSError):
    """A checkpoint cannot be written or read."""


class NotWrittenError(CheckpointError):
    """A file of the run could not be written."""

    exit_code: int = EXIT_NOT_WRITTEN


class LaunchError(HvdtrainError, RuntimeError):
    """The job cannot be started as asked."""


class RunFailedError(HvdtrainError, RuntimeError):
    """A run on several ranks, started from this process, has failed."""

    def __init__(self, message: str, *, code: int, rank: int | None = None,
                 traceback: str = "") -> None:
        super().__init__(message)
        self.exit_code = code
        self.rank = rank
        self.traceback = traceback


class BuildError(HvdtrainError, RuntimeError):
    """Building Horovod failed."""

    exit_code: int = EXIT_BUILD


class MachineError(HvdtrainError, RuntimeError):
    """This machine lacks something that building or starting needs."""

    exit_code: int = EXIT_MACHINE


class MissingExtraError(HvdtrainError, ImportError):
    """An optional package is not installed; the message names the extra that contains it."""
