"""Residue in key names"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

_FIX = "python flows/audit.py source=DIR fix=true out_dir=<folder>"

PEFT_RESIDUE = Entry(
    "PEFT_RESIDUE",
    Severity.ERROR,
    "Names of PEFT's wrappers in a full model",
    "transformers initialises every layer at random with a warning; `There is no module or "
    "parameter named 'base_model'` in vLLM. The wrapped model was saved instead of the merged one",
    f"where only prefixes are left: {_FIX}; where lora_A and lora_B are among the keys, the "
    "adapter was never merged: save it as an adapter, and deliver that",
    ("OpenRLHF #991", "OpenRLHF #920", "OpenRLHF #1081"),
)
WRAPPER_RESIDUE = Entry(
    "WRAPPER_RESIDUE",
    Severity.ERROR,
    "Names that DeepSpeed, torch.compile or FSDP put around the model",
    "no key is the one that loaders look for: transformers initialises the model at random with a "
    "warning, vLLM stops",
    _FIX,
    ("OpenRLHF #991",),
)
TRL_RESIDUE = Entry(
    "TRL_RESIDUE",
    Severity.ERROR,
    "The name that TRL's model with a value head has for the model in it",
    WRAPPER_RESIDUE.why,
    _FIX,
    ("OpenRLHF #991",),
)
ADAPTER_NAME_IN_KEYS = Entry(
    "ADAPTER_NAME_IN_KEYS",
    Severity.ERROR,
    "The adapter's name in the keys of its file",
    "peft finds none of its tensors, warns, and goes on with an adapter that does nothing; vLLM "
    "stops at an unsupported LoRA weight",
    f"{_FIX}; or save it with save_pretrained, which takes the name out",
    ("peft #2500",),
)
ADAPTER_PREFIX = Entry(
    "ADAPTER_PREFIX",
    Severity.ERROR,
    "Keys of an adapter that do not begin as PEFT's do",
    "peft finds none of its tensors and warns; vLLM stops at an unsupported LoRA weight",
    f"keys begin with base_model.model.; {_FIX}",
)
