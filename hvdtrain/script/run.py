"""`run_script`: from the command line of `hvdtrain run` to the script's own exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import TracebackType
from typing import Any

from hvdtrain.config import TrainConfig
from hvdtrain.errors import EXIT_RUN_FAILED, ConfigError, HvdtrainError
from hvdtrain.program import folder_of, run_program
from hvdtrain.runtime.guard import leave_by
from hvdtrain.script.inside import forget, used
from hvdtrain.script.scan import Scan, real_path
from hvdtrain.world import World
from hvdtrain.world.detect import detect_world

_END = "ends the script"


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """What is asked of `hvdtrain run`: the program (`is_module`: a module's name), and how."""

    program: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    config: TrainConfig = TrainConfig()
    explain: bool = False

    @property
    def name(self) -> str:
        """What was typed."""
        return f"-m {self.program}" if self.is_module else self.program


def run_script(options: ScriptOptions) -> dict[str, Any]:
    """Run a script on this rank, as `python` would. All ranks.

    Errors and exits of the script pass through, without frames of hvdtrain before the script's.

    Returns:
        The script's global names.

    Raises:
        ConfigError: The script is not there, or ran without anything to divide over several ranks.
        SystemExit: That of the script.
    """
    flag = "-m" * options.is_module
    path, root = _found(options), folder_of(flag, options.program)
    scan = Scan.of(path, Path(root))
    world = detect_world(os.environ)
    if world.is_chief:
        sys.stderr.write(explanation(options, scan, world))
        sys.stderr.flush()
    if options.explain:
        return {}
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if sys.path and sys.path[0] in ("", os.getcwd(), os.path.dirname(sys.argv[0])):
        sys.path[0] = root
    elif not sys.flags.safe_path:
        sys.path.insert(0, root)
    if sys.excepthook.__module__.startswith("typer"):
        sys.excepthook = sys.__excepthook__  # as a script finds it
    forget()
    _refuse_environment(scan)
    with _served(scan, options.config) as end, _told_as_by_python(scan, end):
        made = run_program(flag, options.program, options.arguments)
        end()
        return made


def _found(options: ScriptOptions) -> Path:
    """The file of the program; ConfigError if it is not there."""
    if options.is_module:
        return _module_file(options.program)
    path = Path(options.program)
    if not path.is_file():
        raise ConfigError(f"The script {path} does not exist. Expected: hvdtrain run SCRIPT "
                          "[ARGUMENTS], or hvdtrain run -m package.module [ARGUMENTS].")
    return path


def _module_file(name: str) -> Path:
    """The file of a module that `python -m` would run; nothing of it is imported."""
    places: Any = [os.getcwd(), *sys.path]
    spec = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), places)
        places = spec and spec.submodule_search_locations
        if end < len(parts) and places is None:
            spec = None
            break
    if spec is not None and places is not None:
        spec = PathFinder.find_spec(f"{name}.__main__", places)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise ConfigError(f"There is no module {name!r} that can be run. Give a module that can be "
                          "imported from here, or a file without -m.")
    return Path(spec.origin)


def explanation(options: ScriptOptions, scan: Scan, world: World) -> str:
    """What is done with the script, line by line."""
    ranks = f"{world.size} rank{'s' if world.size > 1 else ''}"
    who = {"plain": "a plain script: hvdtrain divides its work",
           "horovod": "a Horovod script: it divides its work itself",
           "hvdtrain": "a script that calls hvdtrain: nothing is changed"}[scan.kind]
    lines = [f"hvdtrain run: {options.name} on {ranks}; {who}"]
    if scan.kind == "plain":
        config = options.config.as_launched(os.environ)
        lines.append(
            "  batch sizes are those of each rank, as written; learning rate: "
            f"{config.lr_scaling} scaling" if config.batch == "per_rank" else
            "  batch sizes are those of all ranks together; the learning rate stays")
    places = [(f"{os.path.relpath(one.path)}:{one.line}", one) for one in scan.remarks()]
    width = max((len(place) for place, _ in places), default=0)
    code = min(40, max((len(one.code) for _, one in places), default=0))
    lines += [f"  {place:<{width}}  {one.code[:code]:<{code}}  {one.text}"
              for place, one in places]
    return "\n".join(lines) + "\n"


@contextmanager
def _served(scan: Scan, config: TrainConfig) -> Iterator[Callable[[], None]]:
    """While entered, the script is served as its kind needs it; gives what its end does."""
    def settle() -> None:
        """No loop of the script is to be ended."""
    with ExitStack() as stack:
        from hvdtrain.script import downloads, keras2, tf_config
        if scan.kind == "horovod":
            from hvdtrain.script import horovod_names
            stack.callback(horovod_names.install())
        elif scan.kind == "plain":
            from hvdtrain.script import doors, loops
            from hvdtrain.session import init
            from hvdtrain.train.keras_door import launched
            config = launched(config)
            session = init(collective=config.collective, timeline=config.timeline,
                           hang_timeout_s=config.hang_timeout_s)
            if session.world.size > 1:
                served = loops.Loops(session=session, scan=scan, config=config)
                stack.callback(served.install())
                settle = served.settle
            stack.callback(doors.install(session, config, settle))
        if scan.kind != "hvdtrain":
            # After the doors: they know the arguments of Keras 3 only.
            stack.callback(keras2.install())
            stack.callback(tf_config.install())
            stack.callback(downloads.install())
        yield lambda: _close(scan, settle)


def _refuse_environment(scan: Scan) -> None:
    """Obey what the script sets for TensorFlow before it imports it; refuse another Keras."""
    for name, value in scan.environment.items():
        if name.startswith(("TF_", "XLA_")):
            os.environ.setdefault(name, value)
    backend = scan.environment.get("KERAS_BACKEND", os.environ.get("KERAS_BACKEND", ""))
    if backend not in ("", "tensorflow"):
        raise ConfigError(f"The script uses Keras on {backend!r}; hvdtrain needs 'tensorflow'. Set "
                          "KERAS_BACKEND=tensorflow, or leave it out.")
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        raise ConfigError("TF_USE_LEGACY_KERAS asks for Keras 2 (tf_keras); hvdtrain needs Keras "
                          "3, and serves many idioms of Keras 2 on it. Leave the variable out.")


def _close(scan: Scan, settle: Callable[[], None]) -> None:
    """The script has reached its end: wait for all ranks. All ranks."""
    from hvdtrain.session import started, was_started
    from hvdtrain.train.chief import needs_all
    session = started()
    if session is None or session.world.size == 1:
        world = detect_world(os.environ)
        if session is None and world.size > 1 and not was_started():
            raise ConfigError(
                f"The script has ended on rank {world.rank} of {world.size} and called no init(): "
                f"{world.size} processes have done the same. Call hvd.init() in it, or run it on "
                "one process.")
        return
    settle()
    with needs_all(_END):
        everyone = session.collective.gather_objects((_END, ""))
    if any(tuple(theirs) != (_END, "") for theirs in everyone):
        raise ConfigError("This rank has reached the end of the script while another one trains "
                          "or evaluates. Do not put fit, evaluate or predict behind a condition "
                          "on the rank.")
    if scan.kind == "plain" and not used():
        raise ConfigError(
            f"The script has ended, and nothing in it was divided over the {session.world.size} "
            "ranks: it called no fit, evaluate or predict of a Keras model, and had no loop that "
            "hvdtrain can divide. Each rank has done the same work. Run it on one process, or see "
            "docs/migrating.md.")


@contextmanager
def _told_as_by_python(scan: Scan, end: Callable[[], None]) -> Iterator[None]:
    """An error is told with the script's frames first; one of hvdtrain with the script's line."""
    try:
        yield
    except SystemExit as stop:
        if stop.code in (None, 0):
            end()
        else:
            leave_by(stop, detect_world(os.environ), os.environ)
        raise
    except Exception as error:
        trace = _from_script(error.__traceback__, scan)
        if isinstance(error, HvdtrainError):
            _name_line(error, trace, scan)
            if sys.excepthook is sys.__excepthook__:
                raise
        error.__traceback__ = trace
        sys.excepthook(type(error), error, trace)
        raise SystemExit(EXIT_RUN_FAILED) from None


def _from_script(trace: TracebackType | None, scan: Scan) -> TracebackType | None:
    here = trace
    while here is not None and real_path(here.tb_frame.f_code.co_filename) not in scan.trees:
        here = here.tb_next
    return here or trace


def _name_line(error: HvdtrainError, trace: TracebackType | None, scan: Scan) -> None:
    at = None
    while trace is not None:
        if real_path(trace.tb_frame.f_code.co_filename) in scan.trees:
            at = f"{os.path.relpath(trace.tb_frame.f_code.co_filename)}, line {trace.tb_lineno}"
        trace = trace.tb_next
    if at is not None and error.args:
        error.args = (f"{at}: {error.args[0]}", *error.args[1:])
