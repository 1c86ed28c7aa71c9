"""From what the user typed to a `Job`: a `.toml` file, a `.py` file, or `package.module`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdtrain.errors import ConfigError
from hvdtrain.job import (
    DEFAULT_JOB,
    DEFAULT_OPTIMIZER,
    CompileConfig,
    Job,
    JobFile,
    Named,
    check_default_job,
    read_job_file,
)


def load_job(target: str | None) -> Job:
    """Find and load a job. Every rank; nothing is trained yet.

    Args:
        target: String: path of a `.toml` or `.py` file, or a module name. None: `hvdtrain.toml`
            of the current folder.

    Raises:
        ConfigError: There is no such job, or it is not one.
    """
    if target is None:
        check_default_job()
        target = DEFAULT_JOB
    path = Path(target)
    if path.suffix == ".toml":
        return job_from_file(read_job_file(path))
    module = _load_file(path) if path.suffix == ".py" else _import_module(target)
    function = getattr(module, "job", None)
    if not callable(function):
        raise ConfigError(f"{target} has no function job(). A Python job is a module with a "
                          "function job() that returns a hvdtrain.Job.")
    job = function()
    if not isinstance(job, Job):
        raise ConfigError(f"job() in {target} must return a hvdtrain.Job. "
                          f"Received: {job!r} of type {type(job).__name__}")
    return job


def job_from_file(parsed: JobFile) -> Job:
    """The job that a parsed `.toml` file describes; models and data are made when called."""
    from hvdtrain.zoo import DATASETS, MODELS
    folder = parsed.path.parent

    def model() -> Any:
        built = call(resolve(parsed.model, MODELS, "model", folder), parsed.model, "[model]")
        return _compile(built, parsed, folder)

    def data() -> Any:
        return call(resolve(parsed.data, DATASETS, "data set", folder), parsed.data, "[data]")

    return Job(name=parsed.path.stem, model=model, data=data, config=parsed.train)


def _compile(model: Any, parsed: JobFile, folder: Path) -> Any:
    import keras
    settings = parsed.compile
    if settings.loss is None:
        if getattr(model, "optimizer", None) is None:
            raise ConfigError(f"{parsed.path}: [compile] needs a loss, e.g. "
                              "loss = \"sparse_categorical_crossentropy\"")
        if settings != CompileConfig() or parsed.optimizer != Named(name=DEFAULT_OPTIMIZER):
            raise ConfigError(
                f"{parsed.path}: the model compiles itself, so [compile] and [optimizer] would "
                "be ignored. Take them out, or give [compile] a loss to compile it anew.")
        return model
    optimizer = call(_optimizer_class(parsed.optimizer, folder), parsed.optimizer, "[optimizer]")
    try:
        loss = (resolve(Named(name=settings.loss), {}, "loss", folder) if ":" in settings.loss
                else keras.losses.get(settings.loss))
        if settings.from_logits:
            loss = _from_logits(settings.loss)
        model.compile(optimizer, loss, metrics=list(settings.metrics),
                      steps_per_execution=settings.steps_per_execution)
    except ValueError as error:
        raise ConfigError(f"{parsed.path}, [compile]: {error}") from error
    return model


def _from_logits(loss: str) -> Any:
    import keras
    name = "".join(part.capitalize() for part in loss.split("_"))
    cls = getattr(keras.losses, name, None)
    if cls is None or "from_logits" not in inspect.signature(cls).parameters:
        raise ConfigError(f"from_logits does not go with the loss {loss!r}.")
    return cls(from_logits=True)


def _optimizer_class(named: Named, folder: Path) -> Callable[..., Any]:
    import keras
    if ":" in named.name:
        return resolve(named, {}, "optimizer", folder)
    found = {n.lower(): c for n, c in vars(keras.optimizers).items()
             if inspect.isclass(c) and issubclass(c, keras.optimizers.Optimizer)}
    if named.name.lower() not in found:
        raise ConfigError(f"Unknown optimizer {named.name!r}. Known: "
                          f"{', '.join(sorted(c.__name__ for c in found.values()))}, or "
                          "\"module:Class\".")
    return found[named.name.lower()]


def resolve(named: Named, registry: dict[str, str], kind: str, folder: Path) -> Callable[..., Any]:
    """Find a function by name: in a registry, `module:function` or `file.py:function`.

    Raises:
        ConfigError: There is none; the known names are listed.
    """
    reference = registry.get(named.name, named.name)
    where, separator, attribute = reference.rpartition(":")
    if not separator:
        raise ConfigError(f"Unknown {kind} {named.name!r}. Known: "
                          f"{', '.join(sorted(registry))}, \"module:function\" or "
                          "\"file.py:function\".")
    module = _load_file(folder / where) if where.endswith(".py") else _import_module(where)
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{where} has no function {attribute!r} for the {kind} {named.name!r}.")
    return found  # type: ignore[no-any-return]


def call(function: Callable[..., Any], named: Named, where: str) -> Any:
    """Call a function with a table's arguments; a wrong argument is the user's mistake."""
    try:
        inspect.signature(function).bind(**named.arguments)
    except TypeError as error:
        parameters = ", ".join(inspect.signature(function).parameters)
        raise ConfigError(f"{where} {named.name}: {error}. It takes: "
                          f"{parameters or 'no arguments'}.") from error
    try:
        return function(**named.arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where} {named.name}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"The file {path} does not exist. Give a .toml file, a .py file or a "
                          "module; examples/ has some of each.")
    unique = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"hvdtrain_job_{path.stem}_{unique}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be loaded as Python.")
    module = importlib.util.module_from_spec(spec)
    # Registered first, so that classes in it can be pickled and found by name.
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: {error.msg}.") from error
    return module


def _import_module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"There is no module {name!r}, and no file of that name. Give a .toml file, a .py "
            "file or a module that can be imported from here.") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name!r} is neither a file nor a module name.") from error
