"""Manifests as YAML text that every reader of YAML understands alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from hvdtrain.submit.files import MARK
from hvdtrain.submit.slurm_script import quote

# Words that no version of YAML takes for anything but text. PyYAML alone would leave 1e3 and 0o14
# unquoted, which are numbers for the YAML of Kubernetes.
_PLAIN = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null|nan|inf)$)"
                    r"[A-Za-z/][A-Za-z0-9_./-]*", re.IGNORECASE)


class _Dumper(yaml.SafeDumper):
    """Quotes all text that could be read as something else; writes a repeated value out."""

    def ignore_aliases(self, data: Any) -> bool:
        """Never write `&id001` and `*id001`."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = None if _PLAIN.fullmatch(value) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(manifest: dict[str, Any], version: str, made_by: Sequence[str] = ()) -> str:
    """Write a manifest.

    Args:
        manifest: Mapping of plain values.
        version: String, that of hvdtrain, for the head.
        made_by: Sequence of strings, the arguments of `hvdtrain`, for the head.
    """
    by = f" by: hvdtrain {' '.join(map(quote, made_by))}" if made_by else ""
    body: str = yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, default_flow_style=False,
                          allow_unicode=False, width=1 << 20)
    return f"{MARK}{version}{by}\n{body}"
