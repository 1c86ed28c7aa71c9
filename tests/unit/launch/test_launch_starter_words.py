"""Real messages of real starters about a rank that has ended."""

import pytest

from hvdtrain.launch.starter_words import SaidEnd, StarterWords

SAID = [
    ("srun", "srun: error: hostb: task 2: Exited with exit code 7", SaidEnd(2, 7)),
    ("srun", "srun: error: hosta: tasks 0-1: Exited with exit code 75", SaidEnd(0, 75)),
    ("srun", "srun: error: hostb: task 2: Killed", SaidEnd(2, -9)),
    ("srun", "srun: error: hostb: task 2: Segmentation fault (core dumped)", SaidEnd(2, -11)),
    ("mpirun", "prterun noticed that process rank 1 with PID 344 on node hostb exited on\n"
               "signal 9 (Killed).", SaidEnd(1, -9)),
    ("mpirun", "mpirun noticed that process rank 3 with PID 0 on node n exited on signal 11 "
               "(Segmentation fault).", SaidEnd(3, -11)),
    ("mpirun", "   Process name: [prterun-hosta-6@1,1]\n   Exit code:    7", SaidEnd(1, 7)),
    ("mpirun", "  Process name: [[62115,1],12]\n  Exit code:    3", SaidEnd(12, 3)),
    ("mpirun", "prterun has exited due to process rank 1 with PID 7132 on node vm exiting\n"
               "improperly. There are three reasons this could occur:",
     SaidEnd(1, 1, "left early with code 0")),
    ("mpirun", "prterun has exited due to process rank 0 with PID 0 on node hosta calling\n"
               '"abort". This may have caused other processes in the application to be',
     SaidEnd(0, 1, "called MPI_Abort")),
    ("horovodrun", "Process 1 exit with status code 7.", SaidEnd(1, 7)),
]


@pytest.mark.parametrize(("starter", "text", "expected"), SAID)
def test_the_end_of_a_rank_is_read(starter: str, text: str, expected: SaidEnd) -> None:
    words = StarterWords(starter)
    assert [end for line in text.splitlines() if (end := words.read(line))] == [expected]


@pytest.mark.parametrize("starter", ["srun", "mpirun", "horovodrun"])
def test_other_lines_tell_of_no_end(starter: str) -> None:
    words = StarterWords(starter)
    for line in ("srun: forcing job termination", "Process name: 1", "Exit code: 7", "-----", "",
                 "thus causing the job to be terminated. The first process to do so was:"):
        assert words.read(line) is None
