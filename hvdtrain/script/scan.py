"""What a script does, read from its source: nothing of it runs.

The scan follows imports to files beside the script. It finds the lines with which `hvdtrain run`
does something, and the loops that train with a `GradientTape`.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from hvdtrain.errors import ConfigError
from hvdtrain.script import keras2

Kind = Literal["plain", "horovod", "hvdtrain"]
_METHODS = {
    "fit": "each batch is divided over the ranks, gradients are averaged, the figures are those "
           "of all ranks",
    "evaluate": "divided over the ranks; every rank gets the figures of all samples",
    "predict": "divided over the ranks; every rank gets all predictions",
    "save": "written once, complete, by rank 0",
    "save_weights": "written once, complete, by rank 0",
    "export": "written once, by rank 0",
    "adapt": "on every rank with all of its data; the ranks are compared",
    "train_on_batch": "refused on several ranks: use fit, or a loop with a GradientTape",
}
"""Methods of a Keras model or layer, and what is done with them in a plain script."""
_WRITERS = {"savefig", "to_csv", "to_json", "to_parquet", "to_pickle", "savez", "savetxt",
            "savez_compressed", "imwrite", "imsave"}
_STRATEGIES = ("MirroredStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy",
               "TPUStrategy", "CentralStorageStrategy", "OneDeviceStrategy")
_HOROVOD = "hvdtrain's form of it, for Keras 3, in its place"
_OWN = ("init", "distribute", "fit", "DistributedOptimizer", "DistributedGradientTape", "shard")


@dataclass(frozen=True, order=True)
class Remark:
    """What is done with one line; `code` is what stands there."""

    path: str
    line: int
    code: str
    text: str


@lru_cache(maxsize=4096)
def real_path(name: str) -> str:
    """The path by which the scan knows a file, from the name in a frame."""
    return os.path.realpath(name)


@dataclass(frozen=True)
class Scan:
    """A script and the modules beside it: syntax trees by path, the script's first."""

    trees: dict[str, ast.Module] = field(repr=False)
    root: Path = field(default=Path(), repr=False)

    @classmethod
    def of(cls, path: Path, root: Path) -> Scan:
        """Read a script and what it imports from `root`, the first folder of its `sys.path`.

        Raises:
            ConfigError: The script cannot be read.
        """
        scan = cls({}, root)
        left = [path.absolute()]
        while left:
            here = left.pop()
            name = real_path(str(here))
            if name in scan.trees:
                continue
            try:
                tree = ast.parse(here.read_bytes(), filename=str(here))
            except (SyntaxError, ValueError, OSError) as error:
                if scan.trees:
                    continue  # Python tells it when the module is imported
                why = (f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError)
                       else str(error))
                raise ConfigError(f"{path} cannot be run: {why}.") from error
            scan.trees[name] = tree
            left += _imported_files(tree, here, root)
        return scan

    @cached_property
    def kind(self) -> Kind:
        """Who distributes: the script by Horovod, by hvdtrain, or `hvdtrain run` (plain)."""
        imported = {name for tree in self.trees.values() for name in _imports(tree)}
        if any(name.split(".")[0] == "horovod" or
               name.startswith(("hvdtrain.keras", "hvdtrain.tensorflow")) for name in imported):
            return "horovod"
        used = {name for tree in self.trees.values() for name in _names_of(tree, "hvdtrain")}
        return "hvdtrain" if used & set(_OWN) else "plain"

    @cached_property
    def environment(self) -> dict[str, str]:
        """Variables that the script sets to a text: `os.environ["X"] = "1"`, or by setdefault."""
        found = {}
        for node in ast.walk(next(iter(self.trees.values()))):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
                place, name, value = node.targets[0].value, node.targets[0].slice, node.value
            elif isinstance(node, ast.Call) and _name(node) == "setdefault" and (
                    len(node.args) == len(("name", "value"))):
                place, (name, value) = getattr(node.func, "value", node), node.args
            else:
                continue
            if ast.unparse(place) == "os.environ" and isinstance(name, ast.Constant) and (
                    isinstance(value, ast.Constant)):
                found[str(name.value)] = str(value.value)
        return found

    @cached_property
    def training_lines(self) -> frozenset[tuple[str, int]]:
        """The lines, as (path, line), with the data of loops that train with a tape."""
        return frozenset(at for path, node in self._training_loops()
                         for at in _lines(path, node))

    def remarks(self) -> list[Remark]:
        """What is done with which line, in order."""
        found = []
        for path, tree in self.trees.items():
            printed = False
            for node in ast.walk(tree):
                text = "; ".join(filter(None, (self._remark(node), keras2.remark(node))))
                if not text or (text == _PRINT and printed):
                    continue
                printed = printed or text == _PRINT
                found.append(Remark(path, getattr(node, "lineno", 0), _code(node), text))
        if self.kind == "plain":
            found += [Remark(path, node.lineno, _code(node), _LOOP)
                      for path, node in self._training_loops() if not _is_range(node)]
        order = list(self.trees)
        return sorted(set(found), key=lambda one: (order.index(one.path), one.line, one.code))

    def _remark(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Module):
            return None
        if self.kind == "horovod":
            names = [name for name in _imports(node) if name.split(".")[0] == "horovod"]
            return _HOROVOD if names else None
        if self.kind == "hvdtrain" or not isinstance(node, ast.Call):
            return None
        function, name = node.func, _name(node)
        if name in _STRATEGIES:
            return "refused on several ranks: take tf.distribute out, each rank has one device"
        if not isinstance(function, ast.Attribute):
            if name == "print":
                return _PRINT
            return _WRITES if name == "open" and _opens_to_write(node) else None
        of_numpy = ast.unparse(function.value) in ("np", "numpy", "plt", "tf.io")
        if name in _WRITERS or (name == "save" and of_numpy):
            return _WRITES
        return None if of_numpy else _METHODS.get(name)

    @cached_property
    def _foreign(self) -> dict[str, frozenset[str]]:
        """By path: names that hold only what other packages have made, as `bar = tqdm(...)`."""
        return {path: _foreign_names(tree, Path(path), self.root)
                for path, tree in self.trees.items()}

    def _calls(self, path: str, *parts: ast.AST) -> list[ast.Call]:
        """The calls in parts of a file that may lead to a function of the script."""
        return [node for part in parts for node in ast.walk(part) if isinstance(node, ast.Call)
                and not (isinstance(node.func, ast.Attribute)
                         and set(_names([node.func.value])) & self._foreign[path])]

    def _calls_one_of(self, names: Set[str], path: str, *parts: ast.AST) -> bool:
        return any(_name(call) in names for call in self._calls(path, *parts))

    @cached_property
    def _training_functions(self) -> frozenset[str]:
        """Names of functions that train with a tape, by themselves or by what they call."""
        nodes = [(path, node) for path, tree in self.trees.items() for node in ast.walk(tree)]
        functions = [(path, node) for path, node in nodes
                     if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        others = [(_names(node.targets), _named_in(node.value)) for _, node in nodes
                  if isinstance(node, ast.Assign)]  # step = tf.function(train_step)
        found: set[str] = set()
        while True:
            more = {node.name for path, node in functions if node.name not in found
                    and self._calls_one_of({_TAPE, *found}, path, node)}
            more |= {name for names, named in others if named & found for name in names
                     if name not in found}
            if not more:
                return frozenset(found)
            found |= more

    def _training_loops(self) -> Iterator[tuple[str, ast.expr]]:
        """The data of each loop whose body trains with a tape, and of iterators used in it."""
        trains = {_TAPE, *self._training_functions}
        for path, tree in self.trees.items():
            drawn: set[str] = set()
            for node in ast.walk(tree):
                if isinstance(node, (ast.For, ast.While)):
                    if self._calls_one_of(trains, path, *node.body):
                        if isinstance(node, ast.For):
                            yield path, node.iter
                        drawn |= {ast.unparse(call.args[0])
                                  for call in self._calls(path, *node.body)
                                  if _name(call) == "next" and call.args}
                elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
                                ) and self._calls_one_of(trains, path, node):
                    yield from ((path, part.iter) for part in node.generators)
            for node in ast.walk(tree):
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and (
                        _name(node.value) == "iter") and any(
                        ast.unparse(target) in drawn for target in node.targets):
                    yield path, node.value


_TAPE = "GradientTape"
_PRINT = "print: rank 0 only"
_WRITES = "every rank does this; put it behind `if hvdtrain.is_chief():`"
_LOOP = ("a tf.data.Dataset here is divided over the ranks batch by batch, gradients of variables "
         "from the tape are averaged, results of metrics are those of all ranks")


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree) if isinstance(tree, ast.Module) else [tree]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _names_of(tree: ast.AST, package: str) -> Iterator[str]:
    """The names that are used of a package: `package.NAME`, `from package import NAME`."""
    called = {package, *(alias.asname for node in ast.walk(tree) if isinstance(node, ast.Import)
                         for alias in node.names if alias.name == package and alias.asname)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in called:
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == package:
            yield from (alias.name for alias in node.names)


def _imported_files(tree: ast.AST, path: Path, root: Path) -> Iterator[Path]:
    for node in ast.walk(tree):
        folder, names = root, list(_imports(node))
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = dict(enumerate(path.parents)).get(node.level - 1, root)
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
            names += [node.module] if node.module else []
        for name in names:
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                place = folder.joinpath(*parts[:end])
                yield from (file for file in (place.with_suffix(".py"), place / "__init__.py")
                            if file.is_file())


def _foreign_names(tree: ast.Module, path: Path, root: Path) -> frozenset[str]:
    packages: set[str] = set()
    held: dict[str, list[ast.expr | None]] = {}

    def note(targets: list[ast.expr], value: ast.expr | None) -> None:
        for name in _names(targets):
            held.setdefault(name, []).append(value)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                one = ast.Import([alias]) if isinstance(node, ast.Import) else node
                if not any(_imported_files(one, path, root)):
                    packages.add((alias.asname or alias.name).split(".")[0])
        elif isinstance(node, ast.Assign):
            note(node.targets, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            note([node.target], node.value)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            note([node.optional_vars], node.context_expr)
        elif isinstance(node, (ast.For, ast.comprehension)):
            note([node.target], None)
        elif isinstance(node, ast.arg):
            held.setdefault(node.arg, []).append(None)
    return frozenset(name for name, values in held.items() if all(
        isinstance(value, ast.Call) and _first_name(value.func) in packages for value in values))


def _first_name(node: ast.expr) -> str:
    """`a` of `a.b(c).d`."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")


def _lines(path: str, node: ast.expr) -> Iterator[tuple[str, int]]:
    yield from ((path, line) for line in range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _names(targets: list[ast.expr]) -> list[str]:
    return [target.attr if isinstance(target, ast.Attribute) else target.id
            for target in targets if isinstance(target, (ast.Attribute, ast.Name))]


def _named_in(value: ast.expr) -> set[str]:
    """The functions that a value is, or is made of: `f`, `tf.function(f)`, `partial(f, 3)`."""
    if isinstance(value, ast.IfExp):
        return _named_in(value.body) | _named_in(value.orelse)
    return set(_names(value.args if isinstance(value, ast.Call) else [value]))


def _is_range(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _name(node) == "range"


def _opens_to_write(call: ast.Call) -> bool:
    modes = [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "mode")]
    return any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+")
               for mode in modes)


def _code(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return f"{ast.unparse(node.func)}(...)"
    return ast.unparse(node).splitlines()[0]
