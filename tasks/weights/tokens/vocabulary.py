"""Compare the vocabulary sizes of tokenizer, embedding, output head and config.json.

If the vocabulary grew in training, the adapter stores full embeddings: the output has their rows,
and `resized_config` writes them into config.json. Files that disagree are a finding with all
numbers; nothing is padded or cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.core.errors import ContractError
from tasks.weights.model import Model
from tasks.weights.tokens.tokenizer import TokenizerFacts

_SAVE_WHOLE = (
    "save an adapter with its embeddings: save_pretrained(..., save_embedding_layers=True), or "
    "train with modules_to_save=[embed_tokens, lm_head]"
)


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary sizes of a model that a plan writes."""

    tokenizer: TokenizerFacts
    rows: int  # of the input embedding
    head_rows: int | None  # of the output embedding; None if it is tied or absent
    config: int | None  # `vocab_size` of config.json, which `resized_config` corrects

    def __str__(self) -> str:
        sizes = {
            "tokenizer": self.tokenizer.rows,
            "embedding": self.rows,
            "head": self.head_rows,
            "config.json": self.config,
        }
        return ", ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)

    def findings(self) -> Iterator[str]:
        """Yield the disagreements."""
        if self.tokenizer.rows > self.rows:
            text = f"the tokenizer has {self.tokenizer.rows} ids, the embedding {self.rows} rows"
            yield f"{text}: some ids have no row; {_SAVE_WHOLE} ({self})"
        if self.head_rows is not None and self.head_rows != self.rows:
            yield (
                f"the input embedding has {self.rows} rows, the output embedding {self.head_rows}: "
                f"only one of them was saved after the vocabulary changed; {_SAVE_WHOLE} ({self})"
            )
        special = {f"eos_token_id {token}": token for token in self.tokenizer.stops}
        if self.tokenizer.pad is not None:
            special["pad_token_id"] = self.tokenizer.pad
        for name, token in special.items():
            if not 0 <= token < self.rows:
                yield f"{name} is {token}, the embedding has {self.rows} rows ({self})"


def vocabulary_of(
    shapes: Mapping[str, tuple[int, ...]],
    facts: Model,
    tokenizer: TokenizerFacts,
    config: Mapping[str, Any],
) -> Vocabulary:
    """Return the vocabulary sizes of a model, from the shapes of its tensors by key.

    Raises ContractError if it has no input embedding.
    """
    embedding = shapes.get(facts.embedding)
    if embedding is None:
        raise ContractError(f"no {facts.embedding}: the model has no input embedding")
    live = f"{facts.output_embedding}.weight"
    stored = {slot.live: slot.key for slot in facts.slots if slot.is_all}
    head = shapes.get(stored.get(live, facts.aliases.get(live, live)))
    text = config.get("text_config")
    size = (text if isinstance(text, Mapping) else config).get("vocab_size")
    return Vocabulary(
        tokenizer,
        rows=embedding[0],
        head_rows=head[0] if head is not None else None,
        config=size if isinstance(size, int) else None,
    )


def resized_config(config: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return config.json with `vocab_size` set to `rows`, also in a nested `text_config`."""
    text = config.get("text_config")
    if isinstance(text, dict):
        nested = {**text, "vocab_size": rows}
        top = {"vocab_size": rows} if "vocab_size" in config else {}
        return {**config, **top, "text_config": nested}
    return {**config, "vocab_size": rows}
