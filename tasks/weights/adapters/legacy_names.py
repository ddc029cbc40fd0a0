"""Support adapters that were trained with transformers 4, by its names for layers.

transformers 5 fuses the experts of a layer into one tensor while it loads. transformers 4 had one
linear layer per expert, under the names that checkpoints still have, and its adapters use those
names. For such an adapter the model is described with one linear layer per expert, and its terms
change the tensors on disk directly. peft 0.21 gives the same result when it loads such an adapter,
except with rsLoRA: it doubles rank and alpha of a fused pair, which keeps alpha / rank but makes
alpha / sqrt(rank) too large by sqrt(2).
"""

from __future__ import annotations

from collections.abc import Mapping

from tasks.core.contract import Expected
from tasks.weights.adapters.live import LINEAR, OTHER, LiveModel
from tasks.weights.adapters.pieces import Contract


def contract_by_names(contract: Contract) -> Contract:
    """Return the contract by the names that the adapter uses: those in memory or those on disk.

    Args:
        contract: contract by the names of the model in memory.
    """
    if not contract.live.stored or not _unmatched(contract):
        return contract
    older = Contract(contract.config, older_model(contract.live), contract.file_tensors)
    return older if _unmatched(older) < _unmatched(contract) else contract


def in_memory(live: LiveModel, name: str) -> str:
    """Return the live name of a tensor of the older model; `name` if it is a part of one."""
    stored = live.stored.get(name)
    return stored.live[0] if stored is not None and stored.whole else name


def older_model(live: LiveModel) -> LiveModel:
    """Describe the model by the names of its checkpoint, with every matrix as a linear layer."""
    names = {stored.live[0]: key for key, stored in live.stored.items() if stored.whole}
    gone = {name for stored in live.stored.values() if not stored.whole for name in stored.live}
    kept = {names.get(name, name): name for name in live.tensors if name not in gone}
    tensors = {name: Expected(name, live.tensors[now].shape) for name, now in kept.items()}
    tensors |= {key: Expected(key, x.shape) for key, x in live.stored.items() if not x.whole}
    kinds = {name: live.modules.get(_module(now), OTHER) for name, now in kept.items()}
    return LiveModel(
        tensors=tensors,
        modules=_modules(tensors, kinds),
        tied={names.get(alias, alias): names.get(to, to) for alias, to in live.tied.items()},
        transposed=frozenset(
            _module(n) for n, now in kept.items() if _module(now) in live.transposed
        ),
        input_embedding=_renamed(live.input_embedding, names),
        output_embedding=_renamed(live.output_embedding, names),
    )


def _unmatched(contract: Contract) -> int:
    return len(contract.findings) + len(set(contract.wanted()) ^ set(contract.file_tensors))


def _modules(tensors: Mapping[str, Expected], kinds: Mapping[str, str]) -> dict[str, str]:
    modules: dict[str, str] = {}
    for name, tensor in tensors.items():
        *parents, _ = _module(name).split(".")
        for depth in range(1, len(parents) + 1):
            modules.setdefault(".".join(parents[:depth]), OTHER)
        kind = kinds.get(name, OTHER)
        if kind == OTHER and name.endswith(".weight") and len(tensor.shape) == 2:
            kind = LINEAR
        if modules.get(_module(name), OTHER) == OTHER:
            modules[_module(name)] = kind
    return modules


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _renamed(module: str, names: Mapping[str, str]) -> str:
    return names.get(f"{module}.weight", f"{module}.weight").removesuffix(".weight")
