"""`scripts/test` without arguments: it fails if one of its two streams does, and only then."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Ends with the code for the stream that the arguments tell of.
PYTHON = """#!/bin/sh
case "$*" in
*tests/cluster*) echo second; exit {second} ;;
*tests/ranks*) echo first; exit {first} ;;
esac
exit 9
"""


@pytest.mark.parametrize("codes", [(0, 0), (1, 0), (0, 1), (1, 5)])
def test_the_code_of_both_streams(codes, tmp_path):
    for folder in ("scripts", ".ci"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name, text in (("scripts/setup", "#!/bin/sh\n"), (".venv/bin/ruff", "#!/bin/sh\n"),
                       (".venv/bin/mypy", "#!/bin/sh\n"),
                       (".venv/bin/python", PYTHON.format(first=codes[0], second=codes[1]))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    done = subprocess.run([str(tmp_path / ".ci/run")], text=True, capture_output=True, timeout=60,
                          check=False)
    assert done.returncode == (codes[1] or codes[0]), done.stderr
    assert done.stdout == "first\nsecond\n"
