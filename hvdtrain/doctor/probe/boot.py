"""Program: takes modules through standard input and runs `serve` of them.

Sent to `python -I -S -c ...`; must be readable by every Python 3, so that an old one is told from
a broken one. Reads a line with a size and so many bytes of JSON: `{module: source}`; a package is
a module whose name ends with `.__init__`.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
from typing import Any

MARK = "HVDTRAIN-DOCTOR "
OLDEST = (3, 11)


class Bundle(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports from the texts that were sent."""

    def __init__(self, sources: Any) -> None:
        self._sources = sources

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """A spec for each name that was sent."""
        package = name + ".__init__" in self._sources
        if not package and name not in self._sources:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=package)

    def exec_module(self, module: Any) -> None:
        """Run the text of a module."""
        name = module.__name__
        text = self._sources.get(name + ".__init__", self._sources.get(name))
        exec(compile(text, "<sent> " + name, "exec"), module.__dict__)  # noqa: S102


def read(size: int) -> bytes:
    """Exactly so many bytes: what follows belongs to the next reader."""
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            os._exit(1)
        data += more
    return data


def read_line() -> bytes:
    """A line, byte by byte."""
    line = b""
    while not line.endswith(b"\n"):
        line += read(1)
    return line


def main() -> None:
    """Refuse an old Python in words, else go on with what was sent."""
    if sys.version_info < OLDEST:
        answer = {"too_old": "%d.%d.%d" % sys.version_info[:3]}  # noqa: UP031
        os.write(1, (MARK + json.dumps(answer) + "\n").encode())
        return
    sys.meta_path.insert(0, Bundle(json.loads(read(int(read_line())))))
    from hvdtrain.doctor.probe.serve import serve
    serve(MARK)


if __name__ == "__main__":
    main()
