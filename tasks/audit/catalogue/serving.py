"""What vLLM refuses"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

_MERGE = "merge it before serving: python flows/deliver.py source=DIR base=BASE"

VLLM_ARCHITECTURE = Entry(
    "VLLM_ARCHITECTURE",
    Severity.ERROR,
    "A class that vLLM does not have",
    "vLLM refuses: 'Model architectures [...] are not supported for now'",
    "name the class of the base; a reward model is a *ForSequenceClassification with num_labels 1",
    ("OpenRLHF #1039", "LLaMA-Factory #4379"),
)
VLLM_LORA_RANK = Entry(
    "VLLM_LORA_RANK",
    Severity.WARNING,
    "A rank above vLLM's default limit",
    "vLLM refuses: 'LoRA rank 64 is greater than max_lora_rank 16'",
    "start vLLM with --max-lora-rank of at least this rank",
    ("vLLM #2847", "LLaMA-Factory PR #3794", "gpustack #5438"),
)
VLLM_LORA_DORA = Entry(
    "VLLM_LORA_DORA",
    Severity.WARNING,
    "DoRA",
    "vLLM refuses: 'vLLM does not yet support DoRA', before that 'lora_magnitude_vector is "
    "unsupported LoRA weight'",
    _MERGE,
    ("vLLM #6983",),
)
VLLM_LORA_MODULES_TO_SAVE = Entry(
    "VLLM_LORA_MODULES_TO_SAVE",
    Severity.WARNING,
    "Modules that are stored whole",
    "vLLM takes none but a classification head in an adapter: 'base_model.model.lm_head.weight is "
    "unsupported LoRA weight'",
    _MERGE,
    ("vLLM #9280", "vLLM #4186", "vLLM #32599", "vLLM #7441"),
)
VLLM_LORA_KEY = Entry(
    "VLLM_LORA_KEY",
    Severity.WARNING,
    "Tensors that vLLM's adapter loader cannot name",
    "vLLM refuses the adapter: '... is unsupported LoRA weight'",
    _MERGE,
    ("vLLM #21500",),
)
VLLM_LORA_TOWER = Entry(
    "VLLM_LORA_TOWER",
    Severity.WARNING,
    "Pairs on a vision or audio tower",
    "vLLM adapts the language model of a multimodal model: pairs elsewhere are refused as "
    "unsupported, or left out, unless the engine is told to adapt towers",
    f"train with target_modules of the language model alone, or {_MERGE}",
    ("vLLM #21500",),
)
VLLM_LORA_FEATURE = Entry(
    "VLLM_LORA_FEATURE",
    Severity.WARNING,
    "A setting of peft that vLLM has no counterpart for",
    "vLLM refuses the adapter when it is loaded",
    _MERGE,
)
