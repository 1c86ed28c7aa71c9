"""Slurm's two compact spellings: host lists (`gpu[01-03,7],login`) and counts (`2(x3),1`)."""

from __future__ import annotations

import re

from hvdtrain.errors import WorldError

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Write out a host list as `scontrol show hostnames` does.

    Args:
        text: String, e.g. `"rack[1-2]n[08-10],login"`: zero padding is kept, several brackets
            multiply, the last one runs fastest.

    Raises:
        WorldError: Brackets that do not match, or a range that is none.
    """
    return tuple(name for item in _split_items(text) for name in _expand(item, text))


def expand_counts(text: str) -> tuple[int, ...]:
    """Write out counts per node, e.g. `"2(x3),1"` to `(2, 2, 2, 1)`.

    Raises:
        WorldError: A part is not a number with an optional repetition.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise WorldError(
                f"Cannot read {part!r} in the Slurm task counts {text!r}. "
                "Expected numbers like 2(x3),1.")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _split_items(text: str) -> list[str]:
    """Split at the commas that stand outside brackets."""
    items, depth, start = [], 0, 0
    for position, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth == 0:
            items.append(text[start:position])
            start = position + 1
        if depth not in (0, 1):
            break
    if depth != 0:
        raise WorldError(f"The brackets in the Slurm host list {text!r} do not match.")
    items.append(text[start:])
    return [item.strip() for item in items if item.strip()]


def _expand(item: str, whole: str) -> list[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    body, _, tail = rest.partition("]")
    tails = _expand(tail, whole) if tail else [""]
    return [head + number + end for number in _numbers(body, whole) for end in tails]


def _numbers(body: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for piece in body.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise WorldError(
                f"Cannot read the range {piece!r} in the Slurm host list {whole!r}. "
                "Expected numbers like 1-3 or 08.")
        first, last = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers
