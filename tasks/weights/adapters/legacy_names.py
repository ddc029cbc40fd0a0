"""The model by the names of its checkpoint, which are those that it had in memory before.

transformers 5 renames and fuses while it loads: the experts of a layer are one tensor, where
transformers 4 had a linear layer for each, under the names that the checkpoint still has. Adapters
from that time speak of those layers. For them every rule of PEFT holds as it did then, each expert
a linear layer of its own, and what comes out changes the tensors on disk themselves. (The same as
peft 0.21 makes of such an adapter when it loads it, but for rsLoRA: it doubles rank and alpha of
a fused pair, which is right for alpha / rank and is sqrt(2) too much for alpha / sqrt(rank).)
"""

from __future__ import annotations

from collections.abc import Mapping

from tasks.core.contract import Expected
from tasks.weights.adapters.live import LINEAR, OTHER, LiveModel
from tasks.weights.adapters.pieces import Contract


def contract_by_names(contract: Contract) -> Contract:
    """The contract by the names that the adapter's file uses: the model's, or the checkpoint's.

    Args:
        contract: by the names of the model in memory.
    """
    if not contract.live.stored or not _unmatched(contract):
        return contract
    older = Contract(contract.config, older_model(contract.live), contract.held)
    return older if _unmatched(older) < _unmatched(contract) else contract


def in_memory(live: LiveModel, name: str) -> str:
    """The live tensor that `name` of the older model is all of; `name` where it is only a part."""
    stored = live.stored.get(name)
    return stored.live[0] if stored is not None and stored.whole else name


def older_model(live: LiveModel) -> LiveModel:
    """The model as its checkpoint names it: every matrix that is no embedding is a linear layer."""
    names = {one.live[0]: key for key, one in live.stored.items() if one.whole}
    gone = {name for one in live.stored.values() if not one.whole for name in one.live}
    kept = {names.get(name, name): name for name in live.tensors if name not in gone}
    tensors = {name: Expected(name, live.tensors[now].shape) for name, now in kept.items()}
    tensors |= {key: Expected(key, x.shape) for key, x in live.stored.items() if not x.whole}
    kinds = {name: live.modules.get(_module(now), OTHER) for name, now in kept.items()}
    return LiveModel(
        tensors=tensors,
        modules=_modules(tensors, kinds),
        tied={names.get(one, one): names.get(to, to) for one, to in live.tied.items()},
        transposed=frozenset(
            _module(n) for n, now in kept.items() if _module(now) in live.transposed
        ),
        input_embedding=_renamed(live.input_embedding, names),
        output_embedding=_renamed(live.output_embedding, names),
    )


def _unmatched(contract: Contract) -> int:
    return len(contract.findings) + len(set(contract.wanted()) ^ set(contract.held))


def _modules(tensors: Mapping[str, Expected], kinds: Mapping[str, str]) -> dict[str, str]:
    """Every module with a tensor in it, with its kind."""
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
