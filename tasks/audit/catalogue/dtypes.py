"""dtypes"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

DTYPE_MIXED = Entry(
    "DTYPE_MIXED",
    Severity.WARNING,
    "Weights of different dtypes",
    "loaders cast all of them to one: what was merged or trained in the wider one is rounded then, "
    "after every check that was made before",
    "cast once, at the end of the merge, to the dtype that is served",
    ("LLaMA-Factory #2075", "OpenRLHF PR #1348"),
)
DTYPE_NOT_CONFIG = Entry(
    "DTYPE_NOT_CONFIG",
    Severity.WARNING,
    "Weights of another dtype than config.json says",
    "vLLM casts to what config.json says: bf16 weights served as fp16 overflow, fp32 ones lose "
    "what they were kept for",
    "set dtype in config.json to that of the weights",
    ("LLaMA-Factory #2075", "LLaMA-Factory #3096"),
)
DTYPE_NOT_OF_BASE = Entry(
    "DTYPE_NOT_OF_BASE",
    Severity.WARNING,
    "Weights of another dtype than the base",
    "an exporter changed it: from bf16 to fp16 large values overflow, from fp32 to bf16 small "
    "deltas are rounded away",
    "merge again into the base's dtype",
    ("LLaMA-Factory #2075", "LLaMA-Factory #3096", "LLaMA-Factory #10596"),
)
