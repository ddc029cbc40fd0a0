"""Configuration"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

CONFIG_CHANGED = Entry(
    "CONFIG_CHANGED",
    Severity.ERROR,
    "A setting that the weights depend on differs from the base's",
    "training does not change this setting. With another value the weights compute something "
    "else: the model loads and gives worse responses, often only to long prompts",
    "take the base's value: python flows/audit.py source=DIR base=<the base> fix=true "
    "out_dir=<folder>",
)
CONFIG_DIFFERS = Entry(
    "CONFIG_DIFFERS",
    Severity.WARNING,
    "A setting that training may change differs from the base's",
    "context length, special tokens, tokenizer or processor differ from the base's: changed on "
    "purpose, or lost when the model was saved",
    "compare with the settings of the training; take the base's value if the change was not meant",
)
ROPE_THETA_ABSENT = Entry(
    "ROPE_THETA_ABSENT",
    Severity.WARNING,
    "config.json has no rope_theta, unlike the published models of its family",
    "loaders use 10,000 without a warning. A model that was trained with another base frequency "
    "gives worse responses, most of all to long prompts",
    "add the base's rope_theta: python flows/audit.py source=DIR base=<the base> fix=true "
    "out_dir=<folder>",
)
ROPE_FORM = Entry(
    "ROPE_FORM",
    Severity.WARNING,
    "Rotary settings only in the format of transformers 5",
    "transformers 4, and servers built on it, do not read rope_parameters: they use the default "
    "theta and no scaling, without a warning",
    "write rope_theta and rope_scaling beside rope_parameters: python flows/audit.py source=DIR "
    "fix=true out_dir=<folder>",
    ("vLLM PR #44158", "vLLM PR #42624"),
)
TOKENIZER_CLASS = Entry(
    "TOKENIZER_CLASS",
    Severity.WARNING,
    "A tokenizer class that transformers 4 does not have",
    "'Tokenizer class TokenizersBackend does not exist or is not currently imported': transformers "
    "5 writes that class for tokenizers of any family, and older versions cannot load it",
    "name the family's class, or PreTrainedTokenizerFast: python flows/audit.py source=DIR "
    "fix=true out_dir=<folder>",
    ("LLaMA-Factory #10310", "minimind #578", "QwenPaw #3084"),
)
PROCESSOR_MISSING = Entry(
    "PROCESSOR_MISSING",
    Severity.WARNING,
    "A multimodal model without a processor configuration",
    "vLLM, SGLang and AutoProcessor cannot load it: 'does not appear to have a "
    "file named preprocessor_config.json'",
    "copy preprocessor_config.json and processor_config.json from the base: python flows/audit.py "
    "source=DIR base=<the base> fix=true out_dir=<folder>",
    ("EasyR1 PR #48", "llm-compressor #1305"),
)
ADAPTER_TEXT_NAMES = Entry(
    "ADAPTER_TEXT_NAMES",
    Severity.WARNING,
    "An adapter of a text model with a multimodal base",
    "vLLM accepts an adapter if the ends of its module names match the model's, but applies only "
    "modules whose full names match. Served with this base, the adapter has no effect and there is "
    "no warning",
    "merge it: python flows/deliver.py source=DIR base=<the base> out=<folder>; or rename its "
    "modules to those of the multimodal model",
    ("vLLM #34186", "vLLM #48019"),
)
