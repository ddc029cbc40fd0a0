"""Merged models, value by value"""

from __future__ import annotations

from tasks.doctor.catalogue.entry import Entry
from tasks.doctor.finding import Severity

_AGAIN = (
    "merge again from the base: python flows/deliver.py source=<the adapter> base=<the base> "
    "out=<folder>"
)

MERGE_LEFT_OUT = Entry(
    "MERGE_LEFT_OUT",
    Severity.ERROR,
    "The adapter changes these tensors, and the merged model has the base's",
    "the model is only half the one that was trained; nothing fails, answers are between the two",
    _AGAIN,
)
MERGE_TWICE = Entry(
    "MERGE_TWICE",
    Severity.ERROR,
    "The adapter was added twice",
    "the change is twice as large as the one that was trained; nothing fails. It happens when an "
    "adapter is merged into a model that it was merged into before",
    _AGAIN,
)
MERGE_SCALE = Entry(
    "MERGE_SCALE",
    Severity.ERROR,
    "The adapter was added with another scale",
    "the change is not the one that was trained; nothing fails. The scale is lora_alpha / r, or "
    "lora_alpha / sqrt(r) with use_rslora; rank_pattern and alpha_pattern change both by module",
    _AGAIN,
)
MERGE_TRANSPOSED = Entry(
    "MERGE_TRANSPOSED",
    Severity.ERROR,
    "A square matrix is stored transposed",
    "shapes agree, so it loads everywhere, and the model answers garbage",
    "transpose it, or merge again from the base",
)
MERGE_EXPERTS = Entry(
    "MERGE_EXPERTS",
    Severity.ERROR,
    "Experts in another order than the base's",
    "shapes agree, so it loads everywhere; the router sends every token to the wrong expert",
    _AGAIN,
)
MERGE_CHANGED = Entry(
    "MERGE_CHANGED",
    Severity.ERROR,
    "Not the base plus what the adapter adds",
    "these tensors hold neither the trained change nor the base: rows cut or permuted, a merge of "
    "another adapter, or damage",
    _AGAIN,
)
MERGE_UNTOUCHED = Entry(
    "MERGE_UNTOUCHED",
    Severity.ERROR,
    "Changed, although the adapter does not touch them",
    "the model has changes that nobody trained, or the base is another one",
    "give the base and the adapter that the merge was made of, or merge again",
)
MERGE_MISSING = Entry(
    "MERGE_MISSING",
    Severity.ERROR,
    "Tensors that the merge has to have, and that are not there",
    "transformers initialises them at random with a warning; an embedding that was trained apart "
    "from its tied partner is lost",
    _AGAIN,
)
MERGE_PARTIAL = Entry(
    "MERGE_PARTIAL",
    Severity.WARNING,
    "Some layers are the base's, bit for bit, and others of the same kind are not",
    "a merge that stopped halfway looks like this, and so does training of some layers alone",
    "give the adapter, and every tensor is checked: python flows/audit.py source=DIR "
    "base=<the base> adapter=<the adapter> values=true",
)
MERGE_MIXED_BASE = Entry(
    "MERGE_MIXED_BASE",
    Severity.WARNING,
    "Merged partly into the dequantised base and partly into the original",
    "an adapter belongs to one of the two: the one that training held in memory",
    _AGAIN,
)
MERGE_DEQUANTIZED = Entry(
    "MERGE_DEQUANTIZED",
    Severity.INFO,
    "Merged into the dequantised base",
    "right for an adapter that was trained with 4-bit weights (QLoRA), wrong for any other",
    "nothing, if training loaded the base in 4 bits",
)
MERGE_PROVEN = Entry(
    "MERGE_PROVEN",
    Severity.INFO,
    "Every tensor is base + scale * B A, or the base's",
    "every element was compared; differences are within the rounding of the dtypes",
    "nothing",
)
MERGE_NOT_PROVEN = Entry(
    "MERGE_NOT_PROVEN",
    Severity.WARNING,
    "Tensors that could not be compared with base and adapter",
    "what was not compared is not known to be right",
    "give a merged model and a base in bf16, fp16 or fp32, and the adapter as PEFT saved it",
)
