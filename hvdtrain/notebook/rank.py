"""Program: one rank of a call from a notebook; `python -m hvdtrain.notebook.rank FOLDER`."""

from __future__ import annotations

import os
import sys
import traceback
from itertools import takewhile
from pathlib import Path

import hvdtrain
from hvdtrain.errors import HvdtrainError
from hvdtrain.notebook.call import CallFolder
from hvdtrain.runtime.guard import Guard
from hvdtrain.world.detect import detect_world

_PACKAGE, _THIS = str(Path(hvdtrain.__file__).parent), str(Path(__file__).parent)


def main() -> None:
    """Run the call in the folder that is the first argument, and write its result or failure."""
    for stream in (sys.stdout, sys.stderr):
        # Lines as a whole; progress bars and prompts flush what they write.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    folder = CallFolder(Path(sys.argv.pop(1)))
    world = detect_world(os.environ)
    def pin() -> None:
        # A model of the notebook's would take the devices of all ranks.
        from hvdtrain.train import devices
        devices.pin(world, os.environ)
    try:
        function, args, kwargs = folder.read_call(pin)
        result = function(*args, **kwargs)
        if world.is_chief:
            try:
                folder.write_result(result)
            except Exception as error:
                raise HvdtrainError(
                    f"What the function returns on rank 0 ({type(result).__name__}) cannot be sent "
                    f"to the notebook: {error}. Return arrays, numbers, dicts of them, such as "
                    "history.history or model.get_weights(), or save a file and return its path.",
                ) from error
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the notebook raises it
        folder.write_failure(world.rank, _traceback_of(error))
        Guard(world, report=True).fail(error, told=True)


def _traceback_of(error: BaseException) -> str:
    """As text; for an error of the user with the user's own lines only."""
    told = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in told.stack if not frame.filename.startswith(_THIS)]
    if isinstance(error, HvdtrainError):
        told.__cause__ = told.__context__ = None
        frames = list(takewhile(  # "<string>": the constructor of a dataclass
            lambda frame: not frame.filename.startswith((_PACKAGE, "<string>")), frames))
    told.stack = traceback.StackSummary.from_list(frames)
    return "".join(told.format()).rstrip()


if __name__ == "__main__":
    main()
