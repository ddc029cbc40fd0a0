"""Quantisation"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

QUANT_CONFIG_STALE = Entry(
    "QUANT_CONFIG_STALE",
    Severity.ERROR,
    "config.json says quantised, the tensors are plain",
    "transformers quantises what was merged in 16 bits a second time, without a word; vLLM looks "
    "for packed weights and their scales, and fails",
    "remove quantization_config from config.json",
    ("open-instruct #427", "peft #2321"),
)
QUANT_CONFIG_ABSENT = Entry(
    "QUANT_CONFIG_ABSENT",
    Severity.ERROR,
    "Quantised tensors, and config.json does not say so",
    "loaders take packed bytes for weights: 'size mismatch', or KeyError for the scales",
    "restore quantization_config of the model that was quantised",
)
QUANT_RESIDUE = Entry(
    "QUANT_RESIDUE",
    Severity.ERROR,
    "States of a quantiser beside weights that are not packed, or without them",
    "vLLM fails with KeyError for keys like 'weight.absmax', transformers reports unexpected keys: "
    "a merge left them behind",
    "drop these tensors: they say nothing of weights that are stored in 16 bits",
)
QUANT_PARTIAL = Entry(
    "QUANT_PARTIAL",
    Severity.ERROR,
    "Packed weights without their states",
    "nothing can tell what the packed bytes mean: the values are lost",
    "save the quantised model again",
    ("OpenRLHF #501",),
)
QUANT_MERGED = Entry(
    "QUANT_MERGED",
    Severity.INFO,
    "A model stored in 4 bits",
    "where an adapter was merged into it, its delta was rounded to 4 bits ('Merge lora module to "
    "4-bit linear may get different generations')",
    "merge into the dequantised weights and keep 16 bits: python flows/deliver.py",
    ("peft #2321", "peft #2105", "peft #1043", "unsloth-zoo PR #810"),
)
