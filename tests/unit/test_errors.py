"""Exit codes: one file defines them, the documentation has them all, mistakes share none."""

import ast
import re
from pathlib import Path

import pytest

from hvdtrain import errors
from hvdtrain.optional import MissingExtraError
from hvdtrain.runtime.guard import exit_code_of

ROOT = Path(__file__).resolve().parents[2]
CODES = {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}
#: Sent to other hosts alone, or of the layer that imports nothing of hvdtrain.
ALONE = {"launch/agent.py", "launch/hop.py", "preload/child.py"}


def test_each_code_means_one_thing():
    assert len(set(CODES.values())) == len(CODES)


def test_the_documentation_has_each_code():
    text = (ROOT / "docs/failures.md").read_text().split("\n## Exit codes\n")[1]
    told = {int(code) for code in re.findall(r"^\| (\d+) ", text.split("\n## ")[0], re.MULTILINE)}
    assert told == {0, *CODES.values()}


def literals(path):
    """Lines of a module where an exit code is defined or written as a number."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign):
            names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            if any("EXIT" in name for name in names) and isinstance(node.value, ast.Constant):
                yield node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "os._exit", "sys.exit", "typer.Exit", "exit"):
            values = [a.value for a in node.args if isinstance(a, ast.Constant)]
            if any(isinstance(value, int) and value > 1 for value in values):
                yield node.lineno
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and (
                isinstance(node.left, ast.Constant) and node.left.value == 128):
            yield node.lineno


def test_no_other_module_has_exit_codes_of_its_own():
    package = ROOT / "hvdtrain"
    found = [f"{name}:{line}" for path in sorted(package.rglob("*.py"))
             if (name := str(path.relative_to(package))) not in ALONE | {"errors.py"}
             for line in literals(path)]
    assert not found


@pytest.mark.parametrize(("error", "code"), [
    (errors.ConfigError("x"), 2), (errors.WorldError("x"), 2), (MissingExtraError("x"), 2),
    (errors.NotFiniteError("x"), 5), (errors.RanksDifferError("x"), 6),
    (errors.CollectiveError("x"), 7), (errors.NotWrittenError("x"), 8),
    (RuntimeError("Horovod has been shut down"), 7), (RuntimeError("x"), 1),
    (KeyboardInterrupt(), 130),
])
def test_what_a_scheduler_must_tell_apart_has_another_code(error, code):
    assert exit_code_of(error) == code
