"""The start of the program `hvdtrain`: a usual `launch` needs neither typer nor other commands."""

from __future__ import annotations

import os
import signal
import sys

from hvdtrain.errors import EXIT_RUN_FAILED, EXIT_SIGNALLED, HvdtrainError


def main() -> None:
    """Run the program; an error of the user ends with its message and exit code."""
    try:
        sys.exit(_quick_launch(sys.argv[2:]) if sys.argv[1:2] == ["launch"] else _run())
    except HvdtrainError as error:
        print(f"hvdtrain: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_SIGNALLED + signal.SIGINT)
    except BrokenPipeError:  # the reader of a dry run is gone (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_RUN_FAILED)


def _run() -> int:
    from hvdtrain.cli.main import main
    main()
    return 0


def _quick_launch(words: list[str]) -> int:
    from hvdtrain.cli.words import read_launch
    typed = read_launch(words)
    if typed is None:
        return _run()
    from hvdtrain.cli.launch import run_launch
    code = run_launch(typed)
    sys.stdout.flush()
    return code
