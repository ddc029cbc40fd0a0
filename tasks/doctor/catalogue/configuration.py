"""Configuration"""

from __future__ import annotations

from tasks.doctor.catalogue.entry import Entry
from tasks.doctor.finding import Severity

CONFIG_CHANGED = Entry(
    "CONFIG_CHANGED",
    Severity.ERROR,
    "A setting that the weights depend on is not the base's",
    "training does not change it, and weights that were trained with one value compute something "
    "else with another: the model loads, and answers worse, often only in long texts",
    "take the base's value: python flows/audit.py source=DIR base=<the base> fix=true "
    "out_dir=<folder>",
)
CONFIG_DIFFERS = Entry(
    "CONFIG_DIFFERS",
    Severity.WARNING,
    "A setting that training may change is not the base's",
    "context length, special tokens, tokenizer or processor differ from the base's: meant, or lost "
    "when the model was saved",
    "compare with what training was given; take the base's value where nothing was meant",
)
ROPE_THETA_ABSENT = Entry(
    "ROPE_THETA_ABSENT",
    Severity.WARNING,
    "config.json gives no rope_theta, and published models of the family do",
    "loaders take 10,000 without a word; weights that were trained with another base frequency "
    "answer worse, most of all in long texts",
    "add the base's rope_theta: python flows/audit.py source=DIR base=<the base> fix=true "
    "out_dir=<folder>",
)
ROPE_FORM = Entry(
    "ROPE_FORM",
    Severity.WARNING,
    "Rotary settings in the form of transformers 5 alone",
    "transformers 4, and servers built on it, do not know rope_parameters: they take the default "
    "theta without a word, and no scaling",
    "write rope_theta and rope_scaling beside rope_parameters: python flows/audit.py source=DIR "
    "fix=true out_dir=<folder>",
    ("vLLM PR #44158", "vLLM PR #42624"),
)
TOKENIZER_CLASS = Entry(
    "TOKENIZER_CLASS",
    Severity.WARNING,
    "A tokenizer class that transformers 4 does not have",
    "'Tokenizer class TokenizersBackend does not exist or is not currently imported': transformers "
    "5 writes that class for tokenizers of any family, and nothing older loads it",
    "name the family's class, or PreTrainedTokenizerFast: python flows/audit.py source=DIR "
    "fix=true out_dir=<folder>",
    ("LLaMA-Factory #10310", "minimind #578", "QwenPaw #3084"),
)
PROCESSOR_MISSING = Entry(
    "PROCESSOR_MISSING",
    Severity.WARNING,
    "A multimodal model without its processor's settings",
    "vLLM, SGLang and AutoProcessor fail before a request is answered: 'does not appear to have a "
    "file named preprocessor_config.json'",
    "copy preprocessor_config.json and processor_config.json from the base: python flows/audit.py "
    "source=DIR base=<the base> fix=true out_dir=<folder>",
    ("EasyR1 PR #48", "llm-compressor #1305"),
)
ADAPTER_TEXT_NAMES = Entry(
    "ADAPTER_TEXT_NAMES",
    Severity.WARNING,
    "A text model's adapter on a multimodal base",
    "vLLM accepts an adapter whose module names end as the model's do, and applies only those that "
    "match in full: served with this base it answers as the base does, without a word",
    "merge it: python flows/deliver.py source=DIR base=<the base> out=<folder>; or rename its "
    "modules to those of the multimodal model",
    ("vLLM #34186", "vLLM #48019"),
)
