"""Classes and keys"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

ARCHITECTURE_ABSENT = Entry(
    "ARCHITECTURE_ABSENT",
    Severity.ERROR,
    "config.json names no class",
    "vLLM refuses: 'No model architectures are specified'; transformers needs to be told the class",
    'write "architectures": ["...ForCausalLM"] into config.json',
)
ARCHITECTURE_MODEL_TYPE = Entry(
    "ARCHITECTURE_MODEL_TYPE",
    Severity.ERROR,
    "A class of another family than model_type",
    "transformers goes by model_type, vLLM by the class: they load different models",
    "make both those of the base's config.json",
    ("unsloth #1770", "vLLM #15031"),
)
ARCHITECTURE_KEYS = Entry(
    "ARCHITECTURE_KEYS",
    Severity.ERROR,
    "Keys that are not those of the class",
    "vLLM and SGLang fail with KeyError or 'There is no module or parameter named ...'; "
    "transformers finds its way around some prefixes, and initialises at random, with a warning, "
    "what it does not find",
    "rename the keys to those of the base's checkpoint, or name the class that they belong to",
    (
        "unsloth #1770",
        "vLLM #15031",
        "LLaMA-Factory #8241",
        "LLaMA-Factory #8254",
        "vLLM #18983",
        "GLM-V #61",
        "Impromptu-VLA #52",
        "sglang PR #19850",
        "ms-swift #9172",
        "OpenRLHF #920",
        "GPTQModel #2694",
    ),
)
ARCHITECTURE_LAYERS = Entry(
    "ARCHITECTURE_LAYERS",
    Severity.ERROR,
    "Layers that config.json does not count, or counts and that are not there",
    "transformers initialises missing layers at random with a warning and drops surplus ones; vLLM "
    "fails with KeyError",
    "save the model again; some of its files are of another one",
    ("OpenRLHF #1232",),
)
MTP_MISSING = Entry(
    "MTP_MISSING",
    Severity.WARNING,
    "Multi-token prediction layers that config.json promises are not there",
    "vLLM's speculative decoding fails: 'Following weights were not initialized from checkpoint: "
    "...mtp...'. save_pretrained drops tensors that the class does not use",
    "copy these tensors from the base, or set their number in config.json to 0",
    ("transformers #40968",),
)
