"""A hop that ends at once ends what is started through it, also afterwards."""

import subprocess
import sys

from hvdtrain.errors import EXIT_HOST_LOST
from hvdtrain.launch.tree import HopLink

LIMIT_S = 10.0


def start(command):
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)


def test_a_program_that_is_started_after_the_end_of_its_hop_ends():
    link = HopLink("hostb", start, [sys.executable, "-c", f"raise SystemExit({EXIT_HOST_LOST})"])
    first = link.start_there(["true"])
    assert first.wait(LIMIT_S) == EXIT_HOST_LOST
    assert link.is_lost
    late = link.start_there(["true"])
    assert late.wait(LIMIT_S) == EXIT_HOST_LOST
    for program in (first, late):
        program.stdout.close()
        program.stderr.close()
    link.close()
