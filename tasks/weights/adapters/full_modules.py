"""Pieces stored as full tensors or rows: saved modules, token rows, biases, embeddings."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tasks.weights.adapters.piece import Ground, Piece, stored_keys
from tasks.weights.adapters.targets import saved_modules, token_modules
from tasks.weights.files.names import PEFT_PREFIX
from tasks.weights.plan.adapter_ops import Rows


def saved_pieces(ground: Ground) -> list[Piece]:
    """Return a piece for every tensor of `modules_to_save`."""
    live = ground.live
    inside = tuple(f"{module}." for module in saved_modules(ground.config, live))
    names = [name for name in live.tensors if name.startswith(inside)]
    if ground.config.tying:  # peft then stores the same tensor under each of its names
        names = [name for name in names if live.tied.get(name) not in names]
    return [ground.stored(name, PEFT_PREFIX + name, alone=True) for name in names]


def token_pieces(ground: Ground, findings: list[str]) -> Iterator[Piece]:
    """Yield a piece for every embedding with rows that `trainable_token_indices` trained.

    Args:
        ground: adapter and model.
        findings: list to which reasons are added why a setting cannot be merged.
    """
    config, live = ground.config, ground.live
    rows_of = token_modules(config, live)
    if config.token_indices and not rows_of:
        findings.append(f"trainable_token_indices: the model has no {sorted(config.token_indices)}")
    embedding = rows_of.get(live.input_embedding)
    together = all(rows == embedding for rows in rows_of.values()) or config.tying
    for module, indices in rows_of.items():
        name = f"{module}.weight"
        shape = ground.shape(name)
        if shape is None:
            findings.append(f"{module}: named in trainable_token_indices, but not an embedding")
            continue
        tied = live.input_embedding + ".weight" in live.partners(name)
        if tied and module != live.input_embedding and indices == embedding:
            continue  # the rows of a tied tensor are stored once, with the input embedding
        outside = [row for row in indices if row >= shape[0]]
        if outside:
            findings.append(f"{module}: trained token {outside[0]} is outside its {shape[0]} rows")
        key = f"{PEFT_PREFIX}{module}.token_adapter.trainable_tokens_delta"
        alone = ground.is_tied(name) and not together
        yield Piece(name, {key: (len(indices), shape[1])}, Rows(key, indices), alone=alone)


def bias_pieces(
    ground: Ground, modules: Collection[str], stored: Collection[str]
) -> Iterator[Piece]:
    """Yield a piece for every bias that was trained itself (`bias` "all" or "lora_only").

    Args:
        ground: adapter and model.
        modules: modules with a LoRA pair.
        stored: tensors that `modules_to_save` already stores.
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
    """Yield a piece for every full embedding that peft stored without `modules_to_save`.

    peft does so if the vocabulary grew, or if the embedding is a target.

    Args:
        ground: adapter and model.
        known: keys of tensors that are stored for another reason.
    """
    live, seen = ground.live, set[str]()
    modules = (live.input_embedding, live.output_embedding)
    trained = {module for module in modules if set(known) & set(stored_keys(module))}
    shared = {name for module in trained for name in live.partners(f"{module}.weight")}
    for module in modules:
        name = f"{module}.weight"
        keys = [key for key in stored_keys(module) if key in ground.file_tensors]
        if name not in live.tensors or not keys or module in trained:
            continue
        if name in shared:  # tied to a trained module: a copy of it, or its value before training
            if not ground.config.tying:
                yield ground.stored(name, keys[0], alone=True)
        elif not seen & live.partners(name):  # the copy under another tied name is the same
            yield ground.stored(name, keys[0], alone=False)
        seen |= live.partners(name)
