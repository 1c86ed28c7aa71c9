"""One rank of a call from a notebook: reads the call, makes it, tells what came of it."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from itertools import takewhile
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain.errors import HvdtrainError
from hvdtrain.notebook.call import CallFolder
from hvdtrain.notebook.pickles import define, define_with
from hvdtrain.runtime.guard import Guard
from hvdtrain.world import World
from hvdtrain.world.detect import detect_world

_PACKAGE, _THIS = str(Path(hvdtrain.__file__).parent), str(Path(__file__).parent)


def main() -> None:
    """Do the call in the folder that is the first argument. Every rank."""
    for stream in (sys.stdout, sys.stderr):
        # Lines as a whole; progress bars and prompts flush what they write.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    folder = CallFolder(Path(sys.argv.pop(1)))
    world = detect_world(os.environ)
    try:
        result = _call(folder, world)
        if world.is_chief:
            _return(result, folder)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the notebook raises it
        folder.write_failure(world.rank, _traceback_of(error))
        Guard(world, report=True).fail(error, told=True)


def _call(folder: CallFolder, world: World) -> Any:
    context = folder.read_context()
    sys.path[:] = context.path
    for name, text in context.sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    definitions = folder.read_definitions()
    if definitions or folder.brings_tensorflow():
        # A model of the notebook's would take the devices of all ranks.
        from hvdtrain.train import devices
        devices.pin(world, os.environ)
    module = define(definitions)
    call = folder.read_call()
    define_with(call.function, module)
    return call.function(*call.args, **call.kwargs)


def _return(result: object, folder: CallFolder) -> None:
    try:
        folder.write_result(result)
    except Exception as error:
        raise HvdtrainError(
            f"What the function returns on rank 0 ({type(result).__name__}) cannot be sent to the "
            f"notebook: {error}. Return arrays, numbers, dicts of them, such as history.history "
            "or model.get_weights(), or save a file and return its path.") from error


def _traceback_of(error: BaseException) -> str:
    """Its traceback as text; of a mistake of the user's only the user's own lines."""
    told = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in told.stack if not frame.filename.startswith(_THIS)]
    if isinstance(error, HvdtrainError):
        told.__cause__ = told.__context__ = None
        frames = list(takewhile(  # "<string>": the constructor of a dataclass
            lambda frame: not frame.filename.startswith((_PACKAGE, "<string>")), frames))
    told.stack = traceback.StackSummary.from_list(frames)
    return "".join(told.format()).rstrip()
