"""What launcher and ranks of elastic training share: variables, and names of files of commits.

A commit is a file of its host's memory, `commit-000000001200`: the training after 1200 steps. It is
whole when it has that name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.errors import ConfigError

COMMITS_VARIABLE = "HVDTRAIN_COMMITS"
"""The folder of the commits of this host; elastic training if it is set."""
WORLD_VARIABLE = "HVDTRAIN_WORLD"
"""The number of this world, from 1: a job's ranks between two changes."""
FIRST_VARIABLE = "HVDTRAIN_FIRST_RANKS"
"""How many ranks the first world had."""
ENDING_VARIABLE = "HVDTRAIN_ENDING"
"""Set where too few ranks are left: they write a checkpoint on the disk and end."""
CHANGE = "change"
"""A file of this name in the folder asks all ranks to commit and end."""
SPARE = "spare"
"""The commit before the newest, whose memory the next one uses."""
_NAME = re.compile(r"^commit-(\d{12})$")
_INSTEAD = {
    "ps": "the roles of engine 'ps' are started again by themselves (--max-restarts)",
    "tf": "engine 'tf' goes on from its checkpoints (--resume)",
}


def commit_name(steps: int) -> str:
    """The name of the commit after so many training steps of all worlds."""
    return f"commit-{steps:012d}"


def commits_in(folder: Path) -> list[int]:
    """The steps of the commits that are in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(m[1]) for path in folder.iterdir() if (m := _NAME.match(path.name)))


def refuse_engine(engine: str, environ: Mapping[str, str]) -> None:
    """ConfigError if the launcher asks for elastic training of an engine that has none."""
    if engine in _INSTEAD and COMMITS_VARIABLE in environ:
        raise ConfigError(f"Elastic training needs engine 'allreduce'. Received: {engine!r}. Start "
                          f"the job without it; {_INSTEAD[engine]}.")
