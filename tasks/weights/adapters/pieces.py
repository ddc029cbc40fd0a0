"""Pieces: for every tensor that an adapter changes, which of its keys, which shapes, which term.

This is the adapter's contract, made from its configuration and the model: what peft would have
written for them. `changes` compares it with what the file holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from tasks.contract import TensorLike
from tasks.weights.adapters.config import AdapterConfig
from tasks.weights.adapters.live import CONV1D, EMBEDDING, LINEAR, LiveModel
from tasks.weights.adapters.targets import (
    saved_modules,
    targeted_modules,
    targeted_parameters,
    token_modules,
)
from tasks.weights.names import PEFT_PREFIX
from tasks.weights.terms import Add, Dora, LowRank, Rows, Term

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """The part of an adapter that changes one live tensor.

    Attributes:
        target: live name of the tensor.
        wants: shape by adapter key.
        term: what the tensors do to the target; its operands are plain adapter keys.
        stored: adapter key of the tensor that takes the target's place; "" for none.
        alone: where the target is tied to another tensor, only this name of it was trained.
    """

    target: str
    wants: Mapping[str, Shape]
    term: Term | None = None
    stored: str = ""
    alone: bool = False


@dataclass
class Contract:
    """All pieces of one adapter on one model, and what cannot be.

    Attributes:
        config: the adapter's.
        live: the model.
        held: the tensors that the adapter's file holds, by key.
    """

    config: AdapterConfig
    live: LiveModel
    held: Mapping[str, TensorLike]
    pieces: list[Piece] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        modules = targeted_modules(self.config, self.live)
        for module in modules:
            self.pieces += self._module(module)
        for module, names in targeted_parameters(self.config, self.live).items():
            self.pieces += self._parameters(module, names)
        saved = saved_modules(self.config, self.live)
        inside = tuple(f"{module}." for module in saved)
        stored = [one for one in self.live.tensors if one.startswith(inside)]
        if self.config.tying:  # peft then stores the same tensor under each of its names
            stored = [one for one in stored if self.live.tied.get(one) not in stored]
        self.pieces += [self._stored(one, PEFT_PREFIX + one, alone=True) for one in stored]
        self.pieces += self._tokens()
        self.pieces += self._biases(set(modules), set(stored))
        self.pieces += self._embeddings({piece.stored for piece in self.pieces})
        self.findings += self._twice()

    def wanted(self) -> dict[str, Shape]:
        """Shape of every tensor that the adapter has to hold, by key."""
        return {key: shape for piece in self.pieces for key, shape in piece.wants.items()}

    def _twice(self) -> Iterator[str]:
        """Tensors that two settings change; only a wrapped layer's own weight may be stored too."""
        for name, pieces in groupby(sorted(self.pieces, key=_target), key=_target):
            ways = [one for one in pieces if ".base_layer." not in one.stored]
            if len(ways) > 1:
                yield f"{name}: changed twice, by {' and '.join(min(one.wants) for one in ways)}"

    def _shape(self, name: str) -> Shape | None:
        """Shape of a live tensor; with as many rows as are stored, for a grown embedding."""
        tensor = self.live.tensors.get(name)
        if tensor is None:
            return None
        module = name.removesuffix(".weight")
        if module in (self.live.input_embedding, self.live.output_embedding):
            for key in stored_keys(module):
                if key in self.held and len(self.held[key].shape) == 2:
                    return (self.held[key].shape[0], *tensor.shape[1:])
        return tuple(tensor.shape)

    def _alone(self, name: str) -> bool:
        return len(self.live.partners(name)) > 1 and not self.config.tying

    def _module(self, module: str) -> Iterator[Piece]:
        """The pair on a linear layer or an embedding, and the bias of its B."""
        name, kind = f"{module}.weight", self.live.modules[module]
        shape = self._shape(name)
        if kind not in (LINEAR, CONV1D, EMBEDDING) or shape is None or len(shape) != 2:
            self.findings.append(
                f"{module}: targeted, but no linear layer and no embedding: it cannot be merged"
            )
            return
        prefix, rank = PEFT_PREFIX + module, self.config.rank_of(module)
        turned = kind != LINEAR
        inner, outer = shape if turned else shape[::-1]
        infix, suffix = ("embedding_", "") if kind == EMBEDDING else ("", ".weight")
        a, b = (f"{prefix}.lora_{infix}{half}{suffix}" for half in "AB")
        wants: dict[str, Shape] = {a: (rank, inner), b: (outer, rank)}
        scale = self.config.scale_of(module)
        term: Term = LowRank(a, b, scale, transpose=turned)
        if self.config.dora:
            self._check_tied_dora(module)
            magnitude = f"{prefix}.lora_magnitude_vector"
            wants[magnitude] = (outer,)
            term = Dora(a, b, magnitude, scale, transpose=turned)
        yield Piece(name, wants, term, alone=self._alone(name))
        if self.config.lora_bias:
            yield from self._bias_of_b(module, outer, scale)

    def _check_tied_dora(self, module: str) -> None:
        if self.config.tying and len(self.live.partners(f"{module}.weight")) > 1:
            self.findings.append(
                f"{module}: DoRA has other magnitudes for each use of a tied embedding, so they "
                "are no longer tied; train without ensure_weight_tying"
            )

    def _bias_of_b(self, module: str, outer: int, scale: float) -> Iterator[Piece]:
        name, key = f"{module}.bias", f"{PEFT_PREFIX}{module}.lora_B.bias"
        if name not in self.live.tensors:
            self.findings.append(
                f"{module}: lora_bias needs a bias to be added to, and this layer has none; "
                "serve the adapter unmerged"
            )
            return
        yield Piece(name, {key: (outer,)}, Add(key, scale))

    def _parameters(self, module: str, names: list[str]) -> Iterator[Piece]:
        """Pairs on single parameters. peft nests their wrappers: the first one lies innermost."""
        if self.config.dora or self.config.lora_bias:
            self.findings.append(f"{module}: target_parameters takes neither DoRA nor lora_bias")
            return
        for index, name in enumerate(names):
            prefix = PEFT_PREFIX + module + ".base_layer" * (len(names) - 1 - index)
            a, b = (f"{prefix}.lora_{half}.weight" for half in "AB")
            shape = self.live.tensors[name].shape
            if len(shape) not in (2, 3):
                self.findings.append(f"{name}: targeted, but neither a matrix nor a stack of them")
                continue
            experts = shape[0] if len(shape) == 3 else 1
            turned = len(shape) == 3 and module in self.live.transposed
            inner, outer = shape[-2:] if turned else shape[:-3:-1]
            rank = self.config.rank_of(name) * experts
            wants = {a: (rank, inner), b: (outer, rank)}
            scale = self.config.scale_of(name)
            term = LowRank(a, b, scale, transpose=turned, experts=experts)
            yield Piece(name, wants, term, alone=self._alone(name))

    def _stored(self, name: str, key: str, *, alone: bool) -> Piece:
        wants = {key: self._shape(name) or ()}
        return Piece(name, wants, stored=key, alone=alone and self._alone(name))

    def _tokens(self) -> Iterator[Piece]:
        found = token_modules(self.config, self.live)
        if self.config.token_indices and not found:
            self.findings.append(
                f"trainable_token_indices: the model has no {sorted(self.config.token_indices)}"
            )
        embedding = found.get(self.live.input_embedding)
        for module, indices in found.items():
            name = f"{module}.weight"
            shape = self._shape(name)
            if shape is None:
                self.findings.append(f"{module}: trainable_token_indices names it: no embedding")
                continue
            tied = self.live.input_embedding + ".weight" in self.live.partners(name)
            if tied and module != self.live.input_embedding and indices == embedding:
                continue  # the same rows of the same tensor: stored once, with the embedding
            outside = [row for row in indices if row >= shape[0]]
            if outside:
                self.findings.append(
                    f"{module}: trained token {outside[0]} is outside its {shape[0]} rows"
                )
            key = f"{PEFT_PREFIX}{module}.token_adapter.trainable_tokens_delta"
            together = all(rows == embedding for rows in found.values()) or self.config.tying
            yield Piece(
                name,
                {key: (len(indices), shape[1])},
                Rows(key, indices),
                alone=len(self.live.partners(name)) > 1 and not together,
            )

    def _biases(self, modules: set[str], stored: set[str]) -> Iterator[Piece]:
        """Biases that were trained and are stored as they are now."""
        if self.config.bias == "none":
            return
        for name in self.live.tensors:
            module = name.removesuffix(".bias")
            if module == name or name in stored:
                continue
            if module in modules:
                yield self._stored(name, f"{PEFT_PREFIX}{module}.base_layer.bias", alone=False)
            elif self.config.bias == "all":
                yield self._stored(name, PEFT_PREFIX + name, alone=False)

    def _embeddings(self, known: set[str]) -> Iterator[Piece]:
        """Embeddings stored whole because the vocabulary grew, or because they are targeted."""
        seen: set[str] = set()
        for module in (self.live.input_embedding, self.live.output_embedding):
            name = f"{module}.weight"
            keys = [key for key in stored_keys(module) if key in self.held]
            if name not in self.live.tensors or not keys or known & set(stored_keys(module)):
                continue
            if not seen & self.live.partners(name):  # tied: the other name's copy is the same
                yield self._stored(name, keys[0], alone=False)
            seen |= self.live.partners(name)


def _target(piece: Piece) -> str:
    return piece.target


def stored_keys(module: str) -> tuple[str, ...]:
    """Keys under which peft may store an embedding whole."""
    infixes = ("", "base_layer.", "token_adapter.base_layer.")
    return tuple(f"{PEFT_PREFIX}{module}.{infix}weight" for infix in infixes)
