"""Figures as text, alike on the terminal and in the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NONE = "-"
_KILO = 1000.0
_UNITS = ("B", "kB", "MB", "GB", "TB")


def number(value: float | None) -> str:
    """About three digits."""
    if value is None:
        return NONE
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.3g}"


def spread_text(value: Mapping[str, Any] | None, factor: float = 1.0) -> str:
    """Median and range, as in `812 (790-833)`."""
    if not value:
        return NONE
    median = number(value["median"] * factor)
    if value["count"] == 1:
        return median
    return f"{median} ({number(value['least'] * factor)}-{number(value['most'] * factor)})"


def bytes_text(value: float | None) -> str:
    """Bytes with a decimal unit."""
    if value is None:
        return NONE
    size, units = float(value), list(_UNITS)
    while abs(size) >= _KILO and len(units) > 1:
        size /= _KILO
        del units[0]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.3g} {units[0]}"


def median_bytes(value: Mapping[str, Any] | None) -> str:
    """The median of some bytes."""
    return bytes_text(value["median"]) if value else NONE


def percent(value: float | None) -> str:
    """A share of 1."""
    return NONE if value is None else f"{100 * value:.0f} %"


def ratio_text(value: float | None) -> str:
    """Measured over computed."""
    return NONE if value is None else f"{value:.2f}"
