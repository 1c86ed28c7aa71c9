"""From what the user typed to a `Job`: a `.toml` file, a `.py` file, or `package.module`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
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
    """Load a job from a `.toml` or `.py` file, or a module. None: `./hvdtrain.toml`."""
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
    """The job of a parsed `.toml` file; models and data are made when called."""
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
    optimizers = {} if ":" in parsed.optimizer.name else {
        name: cls for name, cls in vars(keras.optimizers).items()
        if inspect.isclass(cls) and issubclass(cls, keras.optimizers.Optimizer)}
    optimizer = call(resolve(parsed.optimizer, optimizers, "optimizer", folder),
                     parsed.optimizer, "[optimizer]")
    try:
        loss = (resolve(Named(name=settings.loss), {}, "loss", folder) if ":" in settings.loss
                else keras.losses.get(settings.loss))
        if settings.from_logits:
            name = "".join(part.capitalize() for part in settings.loss.split("_"))
            cls = getattr(keras.losses, name, None)
            if cls is None or "from_logits" not in inspect.signature(cls).parameters:
                raise ConfigError(f"from_logits does not go with the loss {settings.loss!r}.")
            loss = cls(from_logits=True)
        model.compile(optimizer, loss, metrics=list(settings.metrics),
                      steps_per_execution=settings.steps_per_execution)
    except ValueError as error:
        raise ConfigError(f"{parsed.path}, [compile]: {error}") from error
    return model


def resolve(named: Named, registry: Mapping[str, Any], kind: str, folder: Path
            ) -> Callable[..., Any]:
    """Find a function by name: in a registry, `module:function` or `file.py:function`."""
    # The registry has such references, or functions.
    known = {name.lower(): found for name, found in registry.items()}
    reference = known.get(named.name.lower(), named.name)
    if callable(reference):
        return reference  # type: ignore[no-any-return]
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
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
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
    _add_to_path(path.parent)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: {error.msg}.") from error
    return module


def _import_module(name: str) -> ModuleType:
    _add_to_path(Path.cwd())
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


def _add_to_path(folder: Path) -> None:
    if str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))
