"""Embeddings, ties and vocabulary"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

TIED_HEAD_ON_DISK = Entry(
    "TIED_HEAD_ON_DISK",
    Severity.WARNING,
    "An output embedding on disk that config.json says is tied",
    "older vLLM fails with KeyError 'lm_head.weight', first seen with Gemma; later ones skip it: "
    "a head that was trained apart from the embedding is lost without a word",
    "where the two are equal remove it; where they differ set tie_word_embeddings to false: "
    "values=true tells",
    ("LLaMA-Factory #2789", "vLLM #3323", "vLLM PR #6758", "transformers #45127"),
)
HEAD_NOT_ON_DISK = Entry(
    "HEAD_NOT_ON_DISK",
    Severity.ERROR,
    "No output embedding, and config.json says it is not tied",
    "transformers initialises lm_head at random with a warning, vLLM refuses: 'Following weights "
    "were not initialized'",
    "set tie_word_embeddings to true if the model was tied, else save it again with its head",
    ("TinyLLaVA #88", "OpenRLHF #180"),
)
VOCAB_SIZE = Entry(
    "VOCAB_SIZE",
    Severity.ERROR,
    "A vocab_size that is not the number of rows",
    "transformers refuses with 'size mismatch', vLLM with an assertion in its embedding loader",
    "set vocab_size in config.json to the number of rows",
    ("LLaMA-Factory #3125", "OpenRLHF #87"),
)
HEAD_ROWS = Entry(
    "HEAD_ROWS",
    Severity.ERROR,
    "Input and output embedding of different sizes",
    "only one of them was saved after the vocabulary changed: no loader takes both",
    "save both embeddings again after resize_token_embeddings",
    ("LLaMA-Factory #10186", "LLaMA-Factory #3154"),
)
TOKENIZER_ROWS = Entry(
    "TOKENIZER_ROWS",
    Severity.ERROR,
    "Tokens without a row in the embedding",
    "a text with such a token indexes past the embedding: an IndexError on CPU, an assertion that "
    "takes the process along on a GPU, garbage in some kernels",
    "resize the embedding to the tokenizer, or serve the tokenizer of the base",
    ("OpenRLHF #87", "OpenRLHF PR #163"),
)
