"""What this process may do."""

import subprocess
import sys


def test_more_open_files_are_allowed_as_far_as_root_lets() -> None:
    """In a process of its own, whose limits it keeps."""
    program = """
import resource
from hvdtrain.errors import MachineError
from hvdtrain.process import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
assert allow_open_files(60) is None
assert allow_open_files(200) == (64, 256)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (200, 256)
try:
    allow_open_files(300)
except MachineError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, text=True,
                          stdout=subprocess.PIPE)
    assert done.stdout.startswith("300 open files are needed, but this login may have 256")
