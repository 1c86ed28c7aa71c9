"""Writes what was generated; a file that a person wrote is not written over."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.errors import LaunchError

MARK = "# Made with hvdtrain "
_HEAD_CHARS = 200


def write_generated(path: Path, text: str, *, executable: bool = False) -> None:
    """Write a generated file, new or in place of an older one.

    Raises:
        LaunchError: Another file of that name is there, or it cannot be written.
    """
    try:
        if path.exists() and MARK not in path.read_text(encoding="utf-8",
                                                        errors="replace")[:_HEAD_CHARS]:
            raise LaunchError(f"{path} is there and was not made by hvdtrain. Give another name, "
                              "or remove it.")
        path.write_text(text, encoding="utf-8")
        if executable:
            path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror or error}. Give another "
                          "name.") from error
