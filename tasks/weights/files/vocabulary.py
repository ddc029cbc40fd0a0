"""How many tokens there are, by everyone who says so: tokenizer, embedding, head, config.json.

A vocabulary that grew in training comes back in the adapter, which then stores its embeddings
whole: the output has their rows, and config.json has to say so (`resized_config`). Where the files
do not agree nothing is padded, cut or made up: it is a finding, with all numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.core.errors import ContractError
from tasks.weights.files.tokenizer import TokenizerFacts
from tasks.weights.plan.contracts import ModelFacts

Shapes = Mapping[str, tuple[int, ...]]
SAVE_WHOLE = (
    "save the adapter with its embeddings: save_pretrained(..., save_embedding_layers=True), or "
    "train with modules_to_save=[embed_tokens, lm_head]"
)


@dataclass(frozen=True)
class Vocabulary:
    """The sizes.

    Attributes:
        tokenizer: highest id + 1.
        rows: of the output's input embedding.
        head_rows: of its output embedding; None where that is tied or absent.
        base_rows: of the base's input embedding; None where there is no base.
        config: `vocab_size` of config.json; None where it has none.
        special: ids that generation and padding rely on, by what they are.
    """

    tokenizer: int
    rows: int
    head_rows: int | None = None
    base_rows: int | None = None
    config: int | None = None
    special: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        said = {
            "tokenizer": self.tokenizer,
            "base": self.base_rows,
            "embedding": self.rows,
            "head": self.head_rows,
            "config.json": self.config,
        }
        return ", ".join(f"{name} {size}" for name, size in said.items() if size is not None)

    def findings(self) -> Iterator[str]:
        """What does not agree; `config` is not looked at: it is made to, by `resized_config`."""
        kept = self.base_rows is not None and self.rows == self.base_rows
        if self.tokenizer > self.rows:
            why = f"the adapter brings no larger one: {SAVE_WHOLE}" if kept else "ids without a row"
            yield (
                f"the tokenizer has {self.tokenizer} ids, the embedding {self.rows} rows; {why} "
                f"({self})"
            )
        if self.head_rows is not None and self.head_rows != self.rows:
            yield (
                f"the input embedding has {self.rows} rows, the output embedding {self.head_rows}: "
                f"only one of them was saved after the vocabulary changed; {SAVE_WHOLE} ({self})"
            )
        for name, token in self.special.items():
            if not 0 <= token < self.rows:
                yield f"{name} is {token}, the embedding has {self.rows} rows ({self})"


def vocabulary_of(
    shapes: Shapes,
    facts: ModelFacts,
    tokenizer: TokenizerFacts,
    config: Mapping[str, Any],
    base: Shapes | None = None,
) -> Vocabulary:
    """The sizes of what a plan makes.

    Args:
        shapes: of the output's tensors, by key.
        facts: of the model.
        tokenizer: that will be served with it.
        config: config.json.
        base: shapes of the base's tensors.

    Raises:
        ContractError: the output has no input embedding.
    """
    embedding = shapes.get(facts.embedding)
    if embedding is None:
        raise ContractError(f"no {facts.embedding}: the model has no embedding to read tokens by")
    head = shapes.get(_head_key(facts))
    before = (base or {}).get(facts.embedding)
    special = {f"eos_token_id {one}": one for one in tokenizer.stops}
    if tokenizer.pad is not None:
        special["pad_token_id"] = tokenizer.pad
    text = config.get("text_config")
    said = (text if isinstance(text, Mapping) else config).get("vocab_size")
    return Vocabulary(
        tokenizer=tokenizer.rows,
        rows=embedding[0],
        head_rows=head[0] if head is not None else None,
        base_rows=before[0] if before is not None else None,
        config=said if isinstance(said, int) else None,
        special=special,
    )


def resized_config(config: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """config.json of a model with so many rows, at the place where the family says it."""
    text = config.get("text_config")
    if isinstance(text, dict):
        nested = {**text, "vocab_size": rows}
        top = {"vocab_size": rows} if "vocab_size" in config else {}
        return {**config, **top, "text_config": nested}
    return {**config, "vocab_size": rows}


def _head_key(facts: ModelFacts) -> str:
    """Key of the output embedding on disk."""
    live = f"{facts.live.output_embedding}.weight"
    stored = {one.live: one.disk for one in facts.places if one.is_all}
    return stored.get(live, facts.aliases.get(live, live))
