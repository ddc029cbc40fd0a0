"""Adapters, their configuration and their base"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

ADAPTER_TYPE = Entry(
    "ADAPTER_TYPE",
    Severity.WARNING,
    "An adapter that is not LoRA",
    "vLLM serves LoRA alone, and no other kind is checked or merged here",
    "merge it with peft's merge_and_unload, and audit the merged model",
)
ADAPTER_CONFIG = Entry(
    "ADAPTER_CONFIG",
    Severity.ERROR,
    "Settings that peft cannot read",
    "peft and vLLM refuse the adapter when they load it",
    "restore the adapter_config.json of the run that trained it",
)
ADAPTER_HALF_PAIR = Entry(
    "ADAPTER_HALF_PAIR",
    Severity.ERROR,
    "One half of a LoRA pair",
    "peft initialises the other half anew and only warns ('Found missing adapter keys'): the "
    "module is as if it had never been trained, or random",
    "save the adapter again from the training run",
    ("OpenRLHF #651",),
)
ADAPTER_RANK = Entry(
    "ADAPTER_RANK",
    Severity.ERROR,
    "Ranks of tensors that the configuration does not say",
    "peft refuses the load with 'size mismatch'; where only alpha / r is wrong, the adapter is "
    "applied with another strength than it was trained with",
    "restore the adapter_config.json of the run that trained it",
)
ADAPTER_ALPHA = Entry(
    "ADAPTER_ALPHA",
    Severity.ERROR,
    "A lora_alpha that makes the adapter do nothing",
    "the delta is lora_alpha / r times B A: with 0 the served model is the base. verl's merger "
    "writes 0 where the training metadata is not found",
    "set lora_alpha to the value of the training run",
    ("verl PR #1821", "verl PR #5326", "verl #7285"),
)
ADAPTER_TARGET_ABSENT = Entry(
    "ADAPTER_TARGET_ABSENT",
    Severity.WARNING,
    "A target module of which no tensor was saved",
    "peft initialises what is not in the file and only warns: if the base has such modules, what "
    "they learnt is lost",
    "run the audit with base=DIR to see whether the base has such modules",
    ("OpenRLHF #651",),
)
ADAPTER_COVERAGE = Entry(
    "ADAPTER_COVERAGE",
    Severity.ERROR,
    "Target modules of the base without a LoRA pair",
    "peft initialises them anew and only warns, axolotl's merge does not say it at all: the model "
    "is partly the trained one and partly the base",
    "save the adapter again from the training run, with all of its tensors gathered",
    ("OpenRLHF #651", "OpenRLHF #682", "ms-swift #6481"),
)
ADAPTER_GAPS = Entry(
    "ADAPTER_GAPS",
    Severity.WARNING,
    "Layers without the pair that other layers have",
    "where the base has these modules, peft initialises them anew and only warns",
    "run the audit with base=DIR to see whether the base has such modules there",
    ("OpenRLHF #651",),
)
ADAPTER_NO_MODULE = Entry(
    "ADAPTER_NO_MODULE",
    Severity.ERROR,
    "Pairs for modules that the base does not have",
    "peft drops them without a word, vLLM refuses the adapter: it was trained on another base",
    "give the base that adapter_config.json names",
    ("LLaMA-Factory #4913",),
)
ADAPTER_SHAPE = Entry(
    "ADAPTER_SHAPE",
    Severity.ERROR,
    "Pairs whose sizes are not the base's",
    "peft and vLLM refuse the load with 'size mismatch': it was trained on another base",
    "give the base that adapter_config.json names",
    ("LLaMA-Factory #4913",),
)
ADAPTER_VOCABULARY = Entry(
    "ADAPTER_VOCABULARY",
    Severity.WARNING,
    "Embeddings in the adapter with other rows than the base has",
    "the vocabulary grew in training: peft fails with 'size mismatch for "
    "...embed_tokens.modules_to_save.default.weight' unless the base is resized first",
    "resize the base to the adapter's rows before peft loads it, or merge with "
    "python flows/deliver.py source=DIR base=BASE, which takes the adapter's rows",
    (
        "LLaMA-Factory #3125",
        "LLaMA-Factory #5262",
        "LLaMA-Factory #3154",
        "LLaMA-Factory #10186",
    ),
)
ADAPTER_DORA = Entry(
    "ADAPTER_DORA",
    Severity.ERROR,
    "DoRA's flag and DoRA's magnitudes do not agree",
    "with the flag and no magnitudes peft takes the base's norms and only warns, without the flag "
    "it drops them without a word: either way the merged model is not the trained one",
    "restore use_dora of the training run, or the tensors lora_magnitude_vector",
)
ADAPTER_SAVED_ABSENT = Entry(
    "ADAPTER_SAVED_ABSENT",
    Severity.ERROR,
    "Names in modules_to_save of which no tensor was saved",
    "peft 0.21 fails with KeyError; earlier ones keep the base's weights there and only warn: what "
    "was trained in full is lost",
    "save the adapter again from the training run, with these modules gathered",
    ("LLaMA-Factory #7665", "peft #2450"),
)
ADAPTER_UNEXPLAINED = Entry(
    "ADAPTER_UNEXPLAINED",
    Severity.WARNING,
    "Tensors that adapter_config.json does not account for",
    "peft drops them without a word, vLLM refuses them as 'unsupported LoRA weight'",
    "restore the settings (modules_to_save, bias, trainable_token_indices) of the training run",
)
ADAPTER_TOKENS = Entry(
    "ADAPTER_TOKENS",
    Severity.ERROR,
    "Trained token rows and their indices do not agree",
    "peft fails to load the rows, or puts them at other tokens than they were trained for",
    "restore trainable_token_indices of the training run",
)
ADAPTER_PARTS_TIE = Entry(
    "ADAPTER_PARTS_TIE",
    Severity.WARNING,
    "An adapter that changes one of two tied embeddings",
    "after a merge input and output embedding differ; while tie_word_embeddings stays true, "
    "loaders take one for both and the model repeats a token",
    "merge with python flows/deliver.py source=DIR base=BASE, which parts the two, or set "
    "tie_word_embeddings to false in the merged config.json",
    ("transformers #45127",),
)
ADAPTER_INIT = Entry(
    "ADAPTER_INIT",
    Severity.WARNING,
    "An initialiser that changed the base's weights",
    "the adapter fits the base as training left it, not the published one: merged into the latter "
    "the model is another one, and vLLM refuses the adapter",
    "save it as a plain LoRA with save_pretrained(..., "
    "path_initial_model_for_weight_conversion=INITIAL_ADAPTER)",
)
ADAPTER_BASE_UNSAID = Entry(
    "ADAPTER_BASE_UNSAID",
    Severity.WARNING,
    "No base named",
    "merging into a wrong base of the same shapes raises nothing anywhere",
    "write base_model_name_or_path (and revision) into adapter_config.json",
    ("LLaMA-Factory #4913",),
)
ADAPTER_IS_NO_MODEL = Entry(
    "ADAPTER_IS_NO_MODEL",
    Severity.INFO,
    "An adapter, which is no model by itself",
    "given to an engine as a model it fails: 'No supported config format found' (unsloth), a "
    "missing config.json (vLLM), a traceback (LLaMA-Factory)",
    "serve it beside its base (vllm serve BASE --enable-lora --lora-modules NAME=DIR), or merge "
    "it: python flows/deliver.py source=DIR base=BASE",
    ("unsloth #1191", "LLaMA-Factory #4896", "LLaMA-Factory #7511"),
)
CONFIG_BESIDE_ADAPTER = Entry(
    "CONFIG_BESIDE_ADAPTER",
    Severity.WARNING,
    "A model's config.json in an adapter's folder",
    "engines take the folder for a full model and find no weights, or load adapter_model as one. "
    "OpenRLHF writes the base's config.json into every adapter",
    "remove config.json from the adapter's folder",
    ("LLaMA-Factory #4896", "LLaMA-Factory #7511"),
)
QLORA_BASE = Entry(
    "QLORA_BASE",
    Severity.WARNING,
    "An adapter that was trained on a 4-bit base",
    "4-bit weights differ from the 16-bit ones by more than most adapters change them: merged "
    "into the 16-bit base, the model is not the one that was trained",
    "merge into the dequantised 4-bit base: python flows/deliver.py source=DIR base=BASE_4BIT",
    ("unsloth-zoo PR #810", "peft #2321", "peft #2105", "peft #1043"),
)
