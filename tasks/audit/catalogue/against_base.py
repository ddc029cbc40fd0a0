"""Against the base"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

WRONG_BASE = Entry(
    "WRONG_BASE",
    Severity.ERROR,
    "Not made from this base",
    "an adapter on another base raises nothing where the shapes agree, and answers garbage: "
    "correct before the merge, wrong after it",
    "give the base that the training run used",
    ("LLaMA-Factory #4913", "LLaMA-Factory #2505", "LLaMA-Factory #5930"),
)
BASE_NAME = Entry(
    "BASE_NAME",
    Severity.WARNING,
    "Another base than adapter_config.json names",
    "an adapter on a wrong base of the same shapes merges without a word",
    "give the base of that name, or correct base_model_name_or_path",
    ("LLaMA-Factory #4913", "LLaMA-Factory #6105"),
)
MERGED_EQUALS_BASE = Entry(
    "MERGED_EQUALS_BASE",
    Severity.ERROR,
    "Every tensor is the base's",
    "nothing was merged: verl's merger leaves LoRA in a folder of its own; LLaMA-Factory exports "
    "the base where export_size gives files of the base's size",
    "merge the adapter: python flows/deliver.py source=ADAPTER base=BASE",
    ("LLaMA-Factory #9051", "LLaMA-Factory #6105", "verl #7285", "verl #4553", "verl #3087"),
)
BASE_TENSORS_LOST = Entry(
    "BASE_TENSORS_LOST",
    Severity.ERROR,
    "Tensors of the base that are not there",
    "transformers initialises them at random with a warning; vLLM fails, or leaves them empty: "
    "'Following weights were not initialized from checkpoint'",
    "copy them from the base: merging with python flows/deliver.py carries all of them",
    ("transformers #40968", "OpenRLHF #1232"),
)
