"""The layers of the design, read from the imports; and what importing the driver loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "hvdtrain"

#: layer -> its modules; a module may import its own layer and those in ALLOWED.
LAYERS = {
    "base": ("cache", "errors", "fork", "log", "optional", "process", "program",
             "whole_file"),
    "facts": ("collective_names", "commit_names", "config", "engine_config", "settings", "hosts",
              "world", "job", "horovod_check"),
    "preload": ("preload",),
    "driver": ("launch", "submit"),
    "notebook": ("notebook",),
    "doctor": ("doctor",),
    "bench": ("bench",),
    "rendezvous": ("rendezvous",),
    "runtime": ("runtime", "bench.usage"),
    "collectives": ("collectives",),
    "data": ("data",),
    "optim": ("optim",),
    "zoo": ("zoo",),
    "build": ("build_horovod",),
    "train": ("train", "session"),
    "horovod names": ("tensorflow", "keras", "elastic"),
    "engines": ("engines",),
    "script": ("script",),
    "entry": ("entry", "rank_main", "doctor.allreduce_probe",
              "bench.job_probe", "bench.job_profile", "bench.exchange_probe", "bench.short_job",
              "notebook.rank"),
    "top": ("cli", "__init__", "__main__"),
}
ALLOWED = {
    "base": set(),
    "facts": {"base"},
    "preload": {"base"},
    "rendezvous": {"base", "facts"},
    "driver": {"base", "facts", "preload", "rendezvous"},
    "notebook": {"base", "facts", "preload", "driver"},
    "doctor": {"base", "facts", "driver"},
    "bench": {"base", "facts", "preload", "driver", "runtime"},
    "runtime": {"base", "facts", "rendezvous"},
    "collectives": {"base", "facts", "rendezvous", "runtime"},
    "data": {"base", "facts", "collectives"},
    "optim": {"base", "facts", "collectives", "data"},
    "zoo": {"base", "facts", "data"},
    "build": {"base", "facts", "rendezvous"},
    "train": {"base", "facts", "rendezvous", "runtime", "collectives", "data", "optim"},
    "horovod names": {"base", "facts", "rendezvous", "runtime", "collectives", "data", "optim",
                      "train"},
    "engines": {"base", "facts", "preload", "rendezvous", "runtime", "collectives", "data", "optim",
                "train"},
    "script": {"base", "facts", "runtime", "collectives", "data", "optim", "train"},
    "entry": {"base", "facts", "preload", "rendezvous", "runtime", "collectives", "data", "optim",
              "zoo", "train", "engines", "notebook"},
    "top": set(LAYERS) - {"top"},
}
HEAVY = ("tensorflow", "keras", "numpy", "horovod", "mpi4py", "sklearn")


def layer_of(module):
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "__init__"
    for wanted in (".".join(parts[1:3]), name):  # a program of ranks stands beside its starter
        for layer, names in LAYERS.items():
            if wanted in names:
                return layer
    raise AssertionError(f"{module} belongs to no layer: add it to LAYERS")


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "hvdtrain":
                yield from (f"hvdtrain.{alias.name}" for alias in node.names
                            if (PACKAGE / alias.name).exists()
                            or (PACKAGE / f"{alias.name}.py").exists())


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(
    p.relative_to(PACKAGE)))
def test_a_module_imports_only_its_layer_and_those_below(path):
    relative = path.relative_to(PACKAGE.parent).with_suffix("")
    own = layer_of(".".join(relative.parts))
    for name in imports_of(path):
        if name.split(".")[0] != "hvdtrain" or name == "hvdtrain":
            continue
        other = layer_of(name)
        assert other == own or other in ALLOWED[own], (
            f"{relative} ({own}) imports {name} ({other})")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(
    p.relative_to(PACKAGE)))
def test_modules_and_functions_stay_short(path):
    tree = ast.parse(path.read_text())
    lines = len(path.read_text().splitlines())
    assert lines <= 400, f"{path.name} has {lines} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not path.match("*/cli/*"):
            doc = ast.get_docstring(node, clean=False)
            code = node.end_lineno - node.lineno - (doc.count("\n") + 1 if doc else 0)
            assert code <= 45, f"{path.name}: {node.name} has {code} lines without its docstring"


def loaded_after(statement):
    program = (f"import sys\n{statement}\n"
               "print(*sorted({m.split('.')[0] for m in sys.modules}))")
    return set(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                              check=True).stdout.split())


@pytest.mark.parametrize("statement", [
    "import hvdtrain", "import hvdtrain.cli.main", "import hvdtrain.launch.execute",
    "import hvdtrain.doctor.examine", "import hvdtrain.bench.compare",
    "import hvdtrain.bench.report", "import hvdtrain.bench.run_report",
    "from hvdtrain.job import read_job_file", "from hvdtrain import notebook_launcher",
])
def test_the_driver_loads_nothing_heavy(statement):
    assert not loaded_after(statement) & set(HEAVY)


def test_the_supervisor_of_a_role_loads_no_tensorflow():
    """There is one on every rank beside the process that does the work."""
    loaded = loaded_after("import hvdtrain.rank_main, hvdtrain.engines.parameter_server.supervisor")
    assert not loaded & {"tensorflow", "keras", "horovod", "mpi4py"}


def test_files_of_tests_have_names_of_their_own():
    """Where folders are no packages, pytest cannot import two files of one name."""
    names = [path.name for path in (PACKAGE.parent / "tests").rglob("test_*.py")
             if not (path.parent / "__init__.py").exists()]
    assert sorted(names) == sorted(set(names))
