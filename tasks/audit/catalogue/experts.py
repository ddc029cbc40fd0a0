"""Experts"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

EXPERTS_INCOMPLETE = Entry(
    "EXPERTS_INCOMPLETE",
    Severity.ERROR,
    "Experts that are not there",
    "transformers 5 refuses with a size mismatch of the fused experts; vLLM and older loaders skip "
    "or re-initialise experts without an error, and the model talks noise",
    "save the model again, or take the missing experts from the base if they were not trained",
)
EXPERTS_COUNT = Entry(
    "EXPERTS_COUNT",
    Severity.ERROR,
    "Another number of experts than config.json says",
    "transformers refuses with 'size mismatch'; engines that place experts by index read past the "
    "end, or leave some empty",
    "set the number of experts in config.json to that of the weights",
)
EXPERTS_MIXED = Entry(
    "EXPERTS_MIXED",
    Severity.ERROR,
    "Experts in two layouts",
    "a loader reads one layout and silently skips the other: part of the model stays as it was "
    "initialised",
    "write all experts in the layout of the base",
    ("1Cat-vLLM PR #21",),
)
EXPERTS_FUSED = Entry(
    "EXPERTS_FUSED",
    Severity.WARNING,
    "Experts fused in one tensor where the family stores each by itself",
    "transformers 5 packs experts in memory; saved that way, vLLM before it learnt the layout, "
    "SGLang and quantisers do not find the experts they look for",
    "write one tensor an expert, as the base has them: save_pretrained of transformers 5 does",
    ("vLLM PR #36997", "vLLM PR #31849", "MoE-Infinity PR #108", "1Cat-vLLM PR #21"),
)
