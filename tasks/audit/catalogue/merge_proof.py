"""Merged models, value by value"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

_AGAIN = (
    "merge again from the base: python flows/deliver.py source=<the adapter> base=<the base> "
    "out=<folder>"
)

MERGE_LEFT_OUT = Entry(
    "MERGE_LEFT_OUT",
    Severity.ERROR,
    "The adapter changes these tensors, but the merged model has the base's values",
    "the model is only partly the trained one. Nothing fails, but responses are worse",
    _AGAIN,
)
MERGE_TWICE = Entry(
    "MERGE_TWICE",
    Severity.ERROR,
    "The adapter was added twice",
    "the change is twice as large as the trained one. Nothing fails. It happens when an adapter is "
    "merged into a model that already contains it",
    _AGAIN,
)
MERGE_SCALE = Entry(
    "MERGE_SCALE",
    Severity.ERROR,
    "The adapter was added with a wrong scale",
    "the change is not the trained one. Nothing fails. The scale is lora_alpha / r, or "
    "lora_alpha / sqrt(r) with use_rslora; rank_pattern and alpha_pattern change both by module",
    _AGAIN,
)
MERGE_TRANSPOSED = Entry(
    "MERGE_TRANSPOSED",
    Severity.ERROR,
    "A square matrix is stored transposed",
    "the shape is the same, so the model loads everywhere, but its responses are garbage",
    "transpose it, or merge again from the base",
)
MERGE_EXPERTS = Entry(
    "MERGE_EXPERTS",
    Severity.ERROR,
    "The experts are not in the order of the base",
    "shapes are the same, so the model loads everywhere, but its router picks the wrong experts",
    _AGAIN,
)
MERGE_CHANGED = Entry(
    "MERGE_CHANGED",
    Severity.ERROR,
    "The values are not the base plus the adapter's change",
    "these tensors match neither the merge nor the base: rows were cut or permuted, another "
    "adapter was merged, or the file is damaged",
    _AGAIN,
)
MERGE_UNTOUCHED = Entry(
    "MERGE_UNTOUCHED",
    Severity.ERROR,
    "Tensors changed that the adapter does not touch",
    "the model has changes that do not come from this adapter, or the base is another one",
    "pass the base and the adapter that were merged, or merge again",
)
MERGE_MISSING = Entry(
    "MERGE_MISSING",
    Severity.ERROR,
    "Tensors are missing in the merged model",
    "transformers initialises them at random with a warning. An embedding that training untied "
    "from the output head is lost",
    _AGAIN,
)
MERGE_PARTIAL = Entry(
    "MERGE_PARTIAL",
    Severity.WARNING,
    "Some layers equal the base's bit for bit, and others of the same kind do not",
    "a merge that stopped halfway looks like this, and so does training of only some layers",
    "pass the adapter to check every tensor: python flows/audit.py source=DIR "
    "base=<the base> adapter=<the adapter> values=true",
)
MERGE_MIXED_BASE = Entry(
    "MERGE_MIXED_BASE",
    Severity.WARNING,
    "Merged partly into the dequantised base and partly into the original",
    "an adapter fits only one of the two: the one that was loaded in training",
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
    "these tensors may be wrong",
    "pass a merged model and a base in bf16, fp16 or fp32, and the adapter as PEFT saved it",
)
