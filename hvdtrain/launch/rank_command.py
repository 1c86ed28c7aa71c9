"""`RankCommand`: what each rank runs, from the words that were typed. Decided here alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.errors import LaunchError

RANK_COMMANDS = ("fit", "world")


def own_words(argv: Sequence[str]) -> tuple[str, ...]:
    """The words after `hvdtrain` in a command line that runs it; empty for any other program."""
    words = list(argv)
    if words and Path(words[0]).name == "hvdtrain":
        return tuple(words[1:])
    if "-m" in words[1:]:
        at = words.index("-m", 1)
        if words[at + 1:at + 2] == ["hvdtrain"] and all(w.startswith("-") for w in words[1:at]):
            return tuple(words[at + 2:])
    return ()


def is_fit(argv: Sequence[str]) -> bool:
    """Whether a command line is a training, which stops on request and says when it is done."""
    words = own_words(argv)
    return words[:1] == ("fit",) and not {"-h", "--help"} & set(words)


@dataclass(frozen=True, kw_only=True)
class RankCommand:
    """An hvdtrain command of the ranks, such as `fit JOB`, or any program."""

    words: tuple[str, ...]
    is_program: bool
    """A program is started as it is; an hvdtrain command by this or another hvdtrain."""

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line with this hvdtrain."""
        return self.words if self.is_program else (sys.executable, "-m", "hvdtrain", *self.words)

    @property
    def own_words(self) -> tuple[str, ...]:
        """The words of an hvdtrain command, also of one that was given as a program."""
        return own_words(self.argv)

    @property
    def is_fit(self) -> bool:
        """Whether it is `hvdtrain fit`, which can resume."""
        return self.own_words[:1] == ("fit",)

    @property
    def can_take_resume(self) -> bool:
        """Whether `--resume` may be added: it is a `fit` that was not told so already."""
        return self.is_fit and "--resume" not in self.words

    @property
    def name(self) -> str:
        """A short name for the job: that of the file or module."""
        words = self.own_words or self.words
        named = [word for word in words[1:] if not word.startswith("-")]
        word = named[0] if named and not words[0].startswith("-") else words[0]
        return Path(word).stem or "job"

    def with_words(self, *words: str) -> RankCommand:
        """The same with more words at its end."""
        return replace(self, words=(*self.words, *words))

    def without(self, word: str) -> RankCommand:
        """The same without one of its words."""
        return replace(self, words=tuple(w for w in self.words if w != word))


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
