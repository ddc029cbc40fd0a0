"""Special tokens and EOS"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

EOS_DISAGREES = Entry(
    "EOS_DISAGREES",
    Severity.ERROR,
    "The tokenizer's end token is not where generation stops",
    "the model was trained to end with the tokenizer's EOS and generate() does not stop there: it "
    "runs on to the length limit, answering itself",
    "put the tokenizer's id into eos_token_id of generation_config.json: "
    "python flows/audit.py source=DIR fix=true out_dir=<folder>",
    (
        "LLaMA-Factory PR #10834",
        "LLaMA-Factory #9338",
        "LLaMA-Factory #2075",
    ),
)
EOS_CONFIGS_DIFFER = Entry(
    "EOS_CONFIGS_DIFFER",
    Severity.WARNING,
    "config.json and generation_config.json stop at different tokens",
    "engines that read config.json alone stop elsewhere than generate() and vLLM do",
    "write the same eos_token_id into both",
    ("LLaMA-Factory #9338",),
)
EOS_NOT_TEMPLATE_END = Entry(
    "EOS_NOT_TEMPLATE_END",
    Severity.WARNING,
    "The chat template ends turns with a token that stops nothing",
    "chat answers end with that token and go on: '<|im_end|>' against '<|endoftext|>'",
    "add its id to eos_token_id of generation_config.json",
    (
        "LLaMA-Factory #3594",
        "LLaMA-Factory #7943",
        "LLaMA-Factory #2884",
        "LLaMA-Factory #1727",
        "verl #1246",
        "EasyR1 PR #11007",
    ),
)
EOS_MISSING = Entry(
    "EOS_MISSING",
    Severity.WARNING,
    "No end token anywhere",
    "every generation runs to its length limit",
    "set eos_token in tokenizer_config.json and eos_token_id in generation_config.json",
    ("LLaMA-Factory #2075",),
)
TOKEN_UNKNOWN = Entry(
    "TOKEN_UNKNOWN",
    Severity.ERROR,
    "A special token that the tokenizer does not have",
    "it has no id: loading adds it as a new token beyond the embedding, or maps it to the unknown "
    "token",
    "name a token of tokenizer.json, or add it and resize the embedding",
    ("OpenRLHF #87", "OpenRLHF #645"),
)
TOKEN_ID_RANGE = Entry(
    "TOKEN_ID_RANGE",
    Severity.ERROR,
    "A token id beyond the embedding",
    "padding or starting with it indexes past the embedding; as an end token it never comes",
    "set the id to one of the tokenizer's",
    ("OpenRLHF #87",),
)
SPECIAL_TOKENS_EMPTY = Entry(
    "SPECIAL_TOKENS_EMPTY",
    Severity.WARNING,
    "A tokenizer without special tokens",
    "an exporter dropped them: vLLM has no EOS to stop at, padding fails",
    "copy special_tokens_map.json and tokenizer_config.json of the trained model",
    ("LLaMA-Factory #2075",),
)
PAD_MISSING = Entry(
    "PAD_MISSING",
    Severity.WARNING,
    "A classifier or reward model without pad_token_id",
    "transformers refuses batches of more than one text: 'Cannot handle batch sizes > 1 if no "
    "padding token is defined'",
    "set pad_token_id in config.json to the tokenizer's",
)
GENERATION_CONFIG_MISSING = Entry(
    "GENERATION_CONFIG_MISSING",
    Severity.INFO,
    "No generation_config.json",
    "sampling defaults and end tokens of the base are lost: verl's Megatron merger drops it",
    "copy generation_config.json of the base, with the trained tokenizer's EOS",
    ("verl #7198",),
)
TOKENIZER_MISSING = Entry(
    "TOKENIZER_MISSING",
    Severity.WARNING,
    "No tokenizer",
    "vLLM does not start on the folder; with the base's tokenizer, tokens and template that "
    "training added are lost",
    "save the tokenizer of the training run into the folder",
)
