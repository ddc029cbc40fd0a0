"""Classes that vLLM and transformers have, of the versions that `known_classes.json` names.

The file is made from the installed libraries by `tests/audit/test_known_classes.py`: importing
either takes longer than a whole audit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DEFAULT_LORA_RANK = 16
"""`--max-lora-rank` of vLLM where it is not given."""


@dataclass(frozen=True)
class Known:
    """What the libraries have.

    Attributes:
        vllm: its version.
        transformers: its version.
        served: classes that vLLM has.
        last_version: the last version of vLLM that had a class, by class.
        suffixes: endings of class names that vLLM takes for one another.
        lora_ranks: largest ranks that vLLM can be started with.
        kinds: classes of each `model_type` in transformers.
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
        """Every class of transformers that generates, sees or classifies."""
        return frozenset().union(*self.kinds.values())

    def serves(self, name: str) -> bool:
        """Whether vLLM has the class, or makes it from one it has: a classifier from a generator
        (`_normalize_arch` of its registry)."""
        if name in self.served:
            return True
        ending = next((one for one in self.suffixes if name.endswith(one)), None)
        if ending is None:
            return False
        stem = name.removesuffix(ending)
        return any(f"{stem}{one}" in self.served for one in self.suffixes if stem)

    def kinds_of(self, name: str) -> frozenset[str]:
        """Every `model_type` of a class."""
        return frozenset(kind for kind, names in self.kinds.items() if name in names)


@cache
def known() -> Known:
    """The list."""
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
