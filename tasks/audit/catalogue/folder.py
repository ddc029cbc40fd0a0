"""The folder and its documents"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

NOTHING_HERE = Entry(
    "NOTHING_HERE",
    Severity.ERROR,
    "Nothing in the folder is known as a model, an adapter or a checkpoint",
    "transformers, peft and vLLM find no configuration and no weights there",
    "name the folder that holds config.json or adapter_config.json",
    ("unsloth #1191", "LLaMA-Factory #4896"),
)
MIXTURE = Entry(
    "MIXTURE",
    Severity.ERROR,
    "A full model and an adapter lie in one folder",
    "vLLM picks weights by pattern: without an index it streams the adapter into the model and "
    "fails with `There is no module or parameter named 'base_model'`; peft and transformers each "
    "load another half",
    "move adapter_config.json and adapter_model.* into a folder of their own",
    ("LLaMA-Factory #7511", "LLaMA-Factory #4896"),
)
CONFIG_MISSING = Entry(
    "CONFIG_MISSING",
    Severity.ERROR,
    "Weights without the configuration that says what they are",
    "transformers, peft and vLLM refuse the folder before they look at a tensor",
    "copy the configuration from the trainer's output, or from the base for a full model",
    ("unsloth #1191",),
)
JSON_UNREADABLE = Entry(
    "JSON_UNREADABLE",
    Severity.ERROR,
    "A document that every loader reads is no JSON object, or too large to be one",
    "transformers and vLLM stop with a JSONDecodeError; a copy that broke off looks like this",
    "copy the file again from where it was made",
)
ODD_ENTRY = Entry(
    "ODD_ENTRY",
    Severity.WARNING,
    "A broken link, a link to a folder, a pipe or a device among the files",
    "a loader that opens it fails or waits for ever; it was not opened here",
    "replace it by a regular file, or remove it",
)
LISTING_CUT = Entry(
    "LISTING_CUT",
    Severity.ERROR,
    "More files than any checkpoint has; the rest was not looked at",
    "what was not looked at cannot be judged",
    "name the folder of the checkpoint itself",
)
CANNOT_JUDGE = Entry(
    "CANNOT_JUDGE",
    Severity.ERROR,
    "A family of checks could not go on: the documents are not what their writers make",
    "loaders read the same documents with less care",
    "look at the document that is named; report it where it is as its tool wrote it",
)
FOREIGN_FORMAT = Entry(
    "FOREIGN_FORMAT",
    Severity.ERROR,
    "A checkpoint that transformers, peft and vLLM do not load as it is",
    "they look for safetensors or .bin files beside config.json; this is a trainer's own layout, "
    "a raw state dict or another runtime's format",
    "convert it with the tool that wrote it",
    ("vLLM #2386", "verl #1679", "verl #2262"),
)
LORA_BESIDE_MODEL = Entry(
    "LORA_BESIDE_MODEL",
    Severity.WARNING,
    "An adapter in a folder beside weights that may not contain it",
    "verl's merger writes the base's weights as the merged model and puts the trained part into "
    "lora_adapter/: served alone, the model is the one that training started from",
    "python flows/audit.py source=<folder>/lora_adapter, then "
    "python flows/deliver.py source=<folder>/lora_adapter base=<the base> out=DIR",
    ("verl #7285", "verl #4553", "verl #3087"),
)
MANIFEST_DIFFERS = Entry(
    "MANIFEST_DIFFERS",
    Severity.ERROR,
    "An artifact of ours whose files are not those of its manifest",
    "what was checked and measured is not what lies here: a file was added, removed or altered",
    "make it again, or restore it from where it was copied",
)
