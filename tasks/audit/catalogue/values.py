"""Values (with values=true)"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

NOT_FINITE = Entry(
    "NOT_FINITE",
    Severity.ERROR,
    "Elements that are infinite or not a number",
    "one of them is enough: every logit becomes NaN, vLLM samples token 0 and writes `!!!!`",
    "take an earlier checkpoint; the run that wrote this one had diverged",
    ("OpenRLHF #1120",),
)
LORA_B_ZERO = Entry(
    "LORA_B_ZERO",
    Severity.ERROR,
    "lora_B is zero throughout: the adapter is as it was initialised and does nothing",
    "the merged model is the base, bit for bit. Training did not reach it, or ZeRO-3 saved it "
    "before the parameters were gathered",
    "take the checkpoint that was trained; compare its step with this one's",
)
ALL_ZERO = Entry(
    "ALL_ZERO",
    Severity.WARNING,
    "A whole matrix of zeros",
    "a layer that passes nothing on: memory that was saved before it was filled",
    "compare it with the base, and save again",
)
CONSTANT_ROWS = Entry(
    "CONSTANT_ROWS",
    Severity.WARNING,
    "Rows of a matrix that are one number throughout",
    "rows that were appended or reset and never trained",
    "compare them with the base",
)
DEAD_EMBEDDING = Entry(
    "DEAD_EMBEDDING",
    Severity.WARNING,
    "Tokens whose embedding is zero",
    "a token that was reserved or added and never trained: a template that uses it tells the model "
    "nothing, and training on it starts from nothing",
    "use tokens that the base was trained with, or train the embeddings too (modules_to_save)",
    ("OpenRLHF #645", "OpenRLHF PR #648"),
)
TIED_HEAD_DIFFERS = Entry(
    "TIED_HEAD_DIFFERS",
    Severity.ERROR,
    "config.json ties the output to the input embedding, and the files hold two different ones",
    "vLLM and transformers drop lm_head.weight and use the embedding: one token over and over",
    'set "tie_word_embeddings": false: python flows/audit.py source=DIR fix=true out_dir=<folder>',
    ("transformers #45127", "vLLM PR #6758"),
)
DTYPE_RANGE = Entry(
    "DTYPE_RANGE",
    Severity.WARNING,
    "Numbers that fp16 cannot hold",
    "serving with dtype=float16, or quantisation methods that work in fp16, turn them into "
    "infinities",
    "serve in bfloat16",
)
SHA256_DIFFERS = Entry(
    "SHA256_DIFFERS",
    Severity.ERROR,
    "Bytes that are not those of the manifest",
    "what was checked and measured is not what lies here",
    "make it again, or restore it from where it was copied",
)
