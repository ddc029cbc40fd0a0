"""Pieces that the adapter's file holds whole: saved modules, token rows, biases, embeddings."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tasks.weights.adapters.piece import Ground, Piece, stored_keys
from tasks.weights.adapters.targets import saved_modules, token_modules
from tasks.weights.files.names import PEFT_PREFIX
from tasks.weights.plan.adapter_ops import Rows


def saved_pieces(ground: Ground) -> list[Piece]:
    """Every tensor of `modules_to_save`."""
    live = ground.live
    inside = tuple(f"{module}." for module in saved_modules(ground.config, live))
    names = [one for one in live.tensors if one.startswith(inside)]
    if ground.config.tying:  # peft then stores the same tensor under each of its names
        names = [one for one in names if live.tied.get(one) not in names]
    return [ground.stored(one, PEFT_PREFIX + one, alone=True) for one in names]


def token_pieces(ground: Ground, findings: list[str]) -> Iterator[Piece]:
    """Rows of embeddings that `trainable_token_indices` trained."""
    config, live = ground.config, ground.live
    found = token_modules(config, live)
    if config.token_indices and not found:
        findings.append(f"trainable_token_indices: the model has no {sorted(config.token_indices)}")
    embedding = found.get(live.input_embedding)
    together = all(rows == embedding for rows in found.values()) or config.tying
    for module, indices in found.items():
        name = f"{module}.weight"
        shape = ground.shape(name)
        if shape is None:
            findings.append(f"{module}: trainable_token_indices names it: no embedding")
            continue
        tied = live.input_embedding + ".weight" in live.partners(name)
        if tied and module != live.input_embedding and indices == embedding:
            continue  # the same rows of the same tensor: stored once, with the embedding
        outside = [row for row in indices if row >= shape[0]]
        if outside:
            findings.append(f"{module}: trained token {outside[0]} is outside its {shape[0]} rows")
        key = f"{PEFT_PREFIX}{module}.token_adapter.trainable_tokens_delta"
        alone = ground.is_tied(name) and not together
        yield Piece(name, {key: (len(indices), shape[1])}, Rows(key, indices), alone=alone)


def bias_pieces(
    ground: Ground, modules: Collection[str], stored: Collection[str]
) -> Iterator[Piece]:
    """Biases that were trained and are stored as they are now.

    Args:
        ground: of the adapter.
        modules: that carry a pair.
        stored: tensors that are stored as a part of a module.
    """
    if ground.config.bias == "none":
        return
    for name in ground.live.tensors:
        module = name.removesuffix(".bias")
        if module == name or name in stored:
            continue
        if module in modules:
            yield ground.stored(name, f"{PEFT_PREFIX}{module}.base_layer.bias", alone=False)
        elif ground.config.bias == "all":
            yield ground.stored(name, PEFT_PREFIX + name, alone=False)


def embedding_pieces(ground: Ground, known: Collection[str]) -> Iterator[Piece]:
    """Embeddings stored whole because the vocabulary grew, or because they are targeted.

    Args:
        ground: of the adapter.
        known: keys of tensors that are stored for another reason.
    """
    live, seen = ground.live, set[str]()
    modules = (live.input_embedding, live.output_embedding)
    trained = {one for one in modules if set(known) & set(stored_keys(one))}
    shared = {name for one in trained for name in live.partners(f"{one}.weight")}
    for module in modules:
        name = f"{module}.weight"
        keys = [key for key in stored_keys(module) if key in ground.held]
        if name not in live.tensors or not keys or module in trained:
            continue
        if name in shared:  # tied to a trained module: a copy of it, or what it was tied to before
            if not ground.config.tying:
                yield ground.stored(name, keys[0], alone=True)
        elif not seen & live.partners(name):  # tied: the other name's copy is the same
            yield ground.stored(name, keys[0], alone=False)
        seen |= live.partners(name)
