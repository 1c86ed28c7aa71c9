"""The directory of the ranks on this host, and whether a file of another host is seen here."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.doctor.facts import DirectoryFacts
from hvdtrain.doctor.probe.python import hash_of

_KINDS = (".py", ".toml")
_MOST_FILES, _MOST_BYTES = 500, 1 << 20


def look_at_directory(path: str) -> DirectoryFacts:
    """Whether it is there, and a hash over the programs and job files in it."""
    folder = Path(path)
    if not folder.is_dir():
        return DirectoryFacts(path=path, exists=False)
    files = [file for file in sorted(folder.iterdir())
             if file.suffix in _KINDS and file.is_file() and file.stat().st_size <= _MOST_BYTES]
    files = files[:_MOST_FILES]
    return DirectoryFacts(path=path, code_files=len(files),
                          code_hash=hash_of(files, folder) if files else "")


def sees(path: str, token: str) -> bool:
    """Whether the file is here with the content that was written elsewhere."""
    try:
        return Path(path).read_text(encoding="utf-8") == token
    except OSError:
        return False
