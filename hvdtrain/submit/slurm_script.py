"""A Slurm batch script as text, from `SlurmOptions` and the command of the ranks.

Nothing that a user types reaches a shell unquoted. Lines that begin with #SBATCH are not read by
a shell but by Slurm, which has its own way with quotes.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import hvdtrain
from hvdtrain.errors import EXIT_STOPPED
from hvdtrain.launch.rank_command import RankCommand
from hvdtrain.submit.slurm_options import SlurmOptions
from hvdtrain.world.secret import SECRET_VARIABLE

_FIT_WAIT_S = 30
_ANSI_C = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\", "'": "\\'"}


def make_script(options: SlurmOptions, command: RankCommand, *,
                made_by: Sequence[str] = ()) -> str:
    """Write the batch script.

    Args:
        options: What was asked for.
        command: What each rank runs.
        made_by: Sequence of strings, the arguments of `hvdtrain`, for the head of the script.
    """
    parts = [_head(made_by), _directives(options, command.name), _environment(options),
             _rank(options, command), _step(options, command), _end(options, command)]
    return "\n".join(part for part in parts if part)


def quote(word: str) -> str:
    """A word for bash on one line, whatever it holds."""
    if any(ord(char) < 32 or ord(char) == 127 for char in word):
        return "$'" + "".join(
            _ANSI_C.get(char, char if 32 <= ord(char) != 127 else f"\\x{ord(char):02x}")
            for char in word) + "'"
    return shlex.quote(word)


def directive(name: str, value: object) -> str:
    """A line for Slurm, which takes away a backslash even within single quotes."""
    return f"#SBATCH --{name}={shlex.quote(str(value).replace(chr(92), chr(92) * 2))}\n"


def _head(made_by: Sequence[str]) -> str:
    by = f" by: hvdtrain {' '.join(map(quote, made_by))}" if made_by else ""
    return f"#!/bin/bash\n# Made with hvdtrain {hvdtrain.__version__}{by}\n"


def _directives(options: SlurmOptions, default_name: str) -> str:
    pairs: list[tuple[str, object]] = [
        ("job-name", options.job_name or default_name), ("nodes", options.nodes),
        ("ntasks", options.ntasks), ("ntasks-per-node", options.ranks_per_node),
        ("gpus-per-node", options.gpus_per_node), ("cpus-per-task", options.cpus_per_task),
        ("mem", options.mem), ("time", options.time), ("partition", options.partition),
        ("account", options.account), ("qos", options.qos), ("constraint", options.constraint),
        ("output", options.output),
        # What the job wrote before it was requeued stays in its log.
        ("open-mode", "append" if options.requeue else None)]
    lines = [directive(name, value) for name, value in pairs if value is not None]
    lines.append(f"#SBATCH --{'' if options.requeue else 'no-'}requeue\n")
    if options.signal_before_s:
        # Without B: before it, the signal goes to the ranks and not to this script.
        lines.append(f"#SBATCH --signal=USR1@{options.signal_before_s}\n")
    lines += [f"#SBATCH {raw}\n" for raw in options.extra]
    return "".join(lines)


def _environment(options: SlurmOptions) -> str:
    lines = []
    if options.modules:
        lines += ["# The function `module` is not there in every batch job.",
                  "if ! type module >/dev/null 2>&1; then",
                  "    for file in /etc/profile.d/{lmod,modules,z00_lmod}.sh; do",
                  '        if [[ -r $file ]]; then source "$file"; fi',
                  "    done", "fi"]
    lines += [f"module load {quote(module)} || exit" for module in options.modules]
    if options.venv is not None:
        lines.append(f"source {quote(str(options.venv / 'bin' / 'activate'))} || exit")
    given = {item.partition("=")[0] for item in options.env}
    if "PYTHONUNBUFFERED" not in given:
        lines.append("export PYTHONUNBUFFERED=1")
    if options.cpus_per_task is not None and "OMP_NUM_THREADS" not in given:
        lines.append('export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"')
    if SECRET_VARIABLE not in given:
        lines += ["# By it the ranks know each other; srun hands it to them.",
                  f"{SECRET_VARIABLE}=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n') || exit",
                  f"export {SECRET_VARIABLE}"]
    for item in options.env:
        name, equals, value = item.partition("=")
        if equals:
            lines.append(f"export {name}={quote(value)}")
        else:
            lines.append(f': "${{{name}?is not set. Submit the job where it is.}}"')
            lines.append(f"export {name}")
    return "".join(f"{line}\n" for line in lines)


def _rank(options: SlurmOptions, command: RankCommand) -> str:
    """The array `rank`. A run that was begun goes on; `--overwrite` is for the first one only."""
    resumes = options.requeue and command.can_take_resume
    overwrites = resumes and "--overwrite" in command.words
    if overwrites:
        command = command.without("--overwrite")
    lines = [f"rank=({' '.join(map(quote, program_of(options, command)))})"]
    if resumes:
        lines += ["if (( ${SLURM_RESTART_COUNT:-0} > 0 )); then", "    rank+=(--resume)"]
        lines += ["else", "    rank+=(--overwrite)"] if overwrites else []
        lines += ["fi"]
    return "".join(f"{line}\n" for line in lines)


def program_of(options: SlurmOptions, command: RankCommand) -> tuple[str, ...]:
    """The whole command line of a rank."""
    if command.is_program:
        return command.words
    if options.program is not None:
        return (options.program, *command.words)
    if options.venv is not None:
        return (str(options.venv / "bin" / "python"), "-m", "hvdtrain", *command.words)
    return command.argv


def _step(options: SlurmOptions, command: RankCommand) -> str:
    wait_s = options.wait_s
    if wait_s is None and command.is_fit:
        wait_s = _FIT_WAIT_S
    words = ["srun", "--mpi=none", "--label"]
    if wait_s is None:
        words.append("--kill-on-bad-exit=1")
        why = "# When a rank fails, the others are ended.\n"
    else:
        # --kill-on-bad-exit sends SIGTERM to the other ranks as soon as the first one has left
        # with 75: a second signal, which ends them at once with another code.
        words += ["--kill-on-bad-exit=0", f"--wait={wait_s}"]
        why = (f"# {wait_s} s after the first rank has ended, srun ends the others.\n" if wait_s
               else "")
    if options.cpus_per_task is not None:
        # Slurm 22.05 and newer do not hand this down to srun.
        words.append('--cpus-per-task="$SLURM_CPUS_PER_TASK"')
    return ("# The ranks get the signals as well; this script has to outlive them.\n"
            "trap : TERM USR1\n"
            f"{why}# In the background, since bash answers signals only between commands.\n"
            f'{" ".join(words)} "${{rank[@]}}" &\n'
            "step=$!\n"
            'while kill -0 "$step" 2>/dev/null; do wait "$step"; done\n'
            'wait "$step"\n'
            "code=$?\n")


def _end(options: SlurmOptions, command: RankCommand) -> str:
    if not options.requeue:
        return "exit $code\n"
    restart = "" if command.is_fit else " SLURM_RESTART_COUNT tells the program so."
    return f"""\
# {EXIT_STOPPED}: the ranks were told to stop, have saved and left.{restart}
if (( code == {EXIT_STOPPED} )); then
    # One that was cancelled is not RUNNING any more, and must not come back.
    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
    if [[ $state != RUNNING ]]; then
        echo "The job is ${{state:-gone}}: it is not requeued." >&2
    elif (( ${{SLURM_RESTART_COUNT:-0}} >= {options.max_requeues} )); then
        echo "The job was requeued {options.max_requeues} times: no more (--max-requeues)." >&2
    else
        # Requeueing ends this script with SIGTERM.
        trap 'exit $code' TERM
        if scontrol requeue "$SLURM_JOB_ID"; then
            sleep 60 &
            wait "$!"
        fi
        echo "The job could not be requeued. Submit it again, with --resume." >&2
    fi
fi
exit $code
"""


def with_absolute_venv(options: SlurmOptions) -> SlurmOptions:
    """The same with the path of the virtual environment from the root."""
    return options if options.venv is None else replace(
        options, venv=Path(options.venv).absolute())
