"""`RankCommand`: what each rank of a submitted job runs, from the words that were typed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import LaunchError

RANK_COMMANDS = ("fit", "world")


@dataclass(frozen=True, kw_only=True)
class RankCommand:
    """An hvdtrain command of the ranks, such as `fit JOB`, or any program."""

    words: tuple[str, ...]
    is_program: bool
    """A program is started as it is; an hvdtrain command by this or another hvdtrain."""

    @property
    def is_fit(self) -> bool:
        """Whether it is `hvdtrain fit`, which can resume."""
        return not self.is_program and self.words[0] == "fit"

    @property
    def can_take_resume(self) -> bool:
        """Whether `--resume` may be added: it is a `fit` that was not told so already."""
        return self.is_fit and "--resume" not in self.words

    @property
    def name(self) -> str:
        """A short name for the job: that of the file or module."""
        named = [word for word in self.words[1:] if not word.startswith("-")]
        word = named[0] if named and not self.words[0].startswith("-") else self.words[0]
        return Path(word).stem or "job"

    def without(self, word: str) -> RankCommand:
        """The same without one of its words."""
        return RankCommand(words=tuple(w for w in self.words if w != word),
                           is_program=self.is_program)


def split_command(words: Sequence[str], what: str) -> RankCommand:
    """Tell an hvdtrain command from a program.

    `fit JOB` and `-- fit JOB` are hvdtrain commands, `-- python train.py` is a program.

    Args:
        words: What was typed after the options, with its `--` doubled as by `LaunchCommand`.
        what: String, the command for messages, e.g. `"hvdtrain slurm"`.

    Raises:
        LaunchError: There is no command, or a program without `--` before it.
    """
    words = list(words)
    after_dashes = bool(words) and words[0] == "--"
    if "--" in words:  # the one that was added; before a program also the one that was typed
        words.remove("--")
    if not words:
        raise LaunchError(f"There is nothing to start. Expected: {what} [options] -- fit JOB")
    if words[0] in RANK_COMMANDS:
        return RankCommand(words=tuple(words), is_program=False)
    if not after_dashes:
        raise LaunchError(
            f"{words[0]!r} is not a command of the ranks. Expected one of: "
            f"{', '.join(RANK_COMMANDS)}; or -- and a program: {what} [options] -- "
            f"{' '.join(words)}")
    return RankCommand(words=tuple(words), is_program=True)
