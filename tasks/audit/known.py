"""Classes that vLLM and transformers have, in the versions that `known_classes.json` names.

`tests/audit/test_known.py` makes the file from the installed libraries: importing either
takes longer than a whole audit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DEFAULT_LORA_RANK = 16
"""Default of vLLM's `--max-lora-rank`."""


@dataclass(frozen=True)
class Known:
    """Classes of the two libraries.

    Attributes:
        vllm: version of vLLM.
        transformers: version of transformers.
        served: classes that vLLM has.
        last_version: for each class that vLLM removed, the last version that had it.
        suffixes: endings of class names that vLLM treats as interchangeable.
        lora_ranks: largest ranks that vLLM can be started with.
        kinds: classes of transformers by `model_type`.
    """

    vllm: str
    transformers: str
    served: frozenset[str]
    last_version: Mapping[str, str]
    suffixes: tuple[str, ...]
    lora_ranks: tuple[int, ...]
    kinds: Mapping[str, frozenset[str]]

    @property
    def classes(self) -> frozenset[str]:
        """All classes of transformers that generate or classify."""
        return frozenset().union(*self.kinds.values())

    def serves(self, name: str) -> bool:
        """Return True if vLLM has the class or derives it, e.g. a classifier from a generator.

        See `_normalize_arch` of vLLM's registry.
        """
        if name in self.served:
            return True
        ending = next((suffix for suffix in self.suffixes if name.endswith(suffix)), None)
        if ending is None:
            return False
        stem = name.removesuffix(ending)
        return any(f"{stem}{suffix}" in self.served for suffix in self.suffixes if stem)

    def kinds_of(self, name: str) -> frozenset[str]:
        """Return every `model_type` of a class."""
        return frozenset(kind for kind, names in self.kinds.items() if name in names)


@cache
def known() -> Known:
    """Load `known_classes.json`."""
    raw = json.loads(Path(__file__).with_name("known_classes.json").read_text())
    vllm, transformers = raw["vllm"], raw["transformers"]
    return Known(
        vllm=vllm["version"],
        transformers=transformers["version"],
        served=frozenset(vllm["classes"]),
        last_version=vllm["last_version"],
        suffixes=tuple(vllm["suffixes"]),
        lora_ranks=tuple(vllm["lora_ranks"]),
        kinds={kind: frozenset(names) for kind, names in transformers["classes"].items()},
    )
