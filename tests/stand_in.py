"""Program: stands for a Python program that runs in a fork, or is it where it may not.

`python -IS stand_in.py COMMAND ...`, with HVDTRAIN_PRELOAD in the environment: its streams,
signals and exit code are those of the fork.
"""

import os
import signal
import sys
from contextlib import suppress

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
                                "hvdtrain", "preload"))
import client  # noqa: E402 - of the standard library alone


def main() -> None:
    command = sys.argv[1:]
    try:
        program = client.ForkedProgram(os.environ.get(client.SOCKET_VARIABLE, ""), command,
                                       env=os.environ)
        program.begin()
    except client.RefusedError as error:
        sys.stderr.write(f"{command[0]} runs as a new process: {error}\n")
        os.execvp(command[0], command)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        if signal.getsignal(number) is not signal.SIG_IGN:
            with suppress(OSError):  # those that the C library keeps for itself
                signal.signal(number, lambda number, frame: program.send_signal(number))
    code = program.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
