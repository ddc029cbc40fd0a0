"""Findings about the model class, its settings and the storage of its weights."""

from __future__ import annotations

from tasks.audit.finding import Section, error, info, warning


class Architecture(Section, heading="Classes and keys"):
    ARCHITECTURE_ABSENT = error(
        "config.json names no class",
        "vLLM refuses: 'No model architectures are specified'; transformers needs an explicit "
        "class",
        'write "architectures": ["...ForCausalLM"] into config.json',
    )
    ARCHITECTURE_MODEL_TYPE = error(
        "The class and model_type belong to different families",
        "transformers uses model_type, vLLM the class: they load different models",
        "copy both from the base's config.json",
        "unsloth #1770, vLLM #15031",
    )
    ARCHITECTURE_KEYS = error(
        "Keys that do not belong to the class",
        "vLLM and SGLang fail with KeyError or 'There is no module or parameter named ...'; "
        "transformers corrects some prefixes, and initialises the tensors that it does not find "
        "at random, with a warning",
        "rename the keys to those of the base's checkpoint, or set the class that they belong to",
        "unsloth #1770, vLLM #15031, LLaMA-Factory #8241, LLaMA-Factory #8254, vLLM #18983, "
        "GLM-V #61, Impromptu-VLA #52, sglang PR #19850, ms-swift #9172, OpenRLHF #920, "
        "GPTQModel #2694",
    )
    ARCHITECTURE_LAYERS = error(
        "More or fewer layers than config.json says",
        "transformers initialises missing layers at random with a warning and drops surplus ones; "
        "vLLM fails with KeyError",
        "save the model again; some of its files belong to another model",
        "OpenRLHF #1232",
    )
    MTP_MISSING = warning(
        "Multi-token prediction layers of config.json that are missing",
        "vLLM's speculative decoding fails: 'Following weights were not initialized from "
        "checkpoint: ...mtp...'. save_pretrained drops tensors that the class does not use",
        "copy these tensors from the base, or set their number in config.json to 0",
        "transformers #40968",
    )


class Quantisation(Section, heading="Quantisation"):
    QUANT_CONFIG_STALE = error(
        "config.json says quantised, but the tensors are not",
        "transformers silently quantises the merged 16-bit weights again; vLLM looks for packed "
        "weights and their scales, and fails",
        "remove quantization_config from config.json",
        "open-instruct #427, peft #2321",
    )
    QUANT_CONFIG_ABSENT = error(
        "Quantised tensors, but config.json does not say so",
        "loaders read packed bytes as weights: 'size mismatch', or KeyError for the scales",
        "restore quantization_config of the quantised model",
    )
    QUANT_NO_SCALES = error(
        "8-bit numbers without quantization_config and scales",
        "the stored numbers are not the weights: loaders cast them as they are, and responses are "
        "garbage. A merge that copies or drops scales leaves them like this",
        "restore quantization_config and the scales, or merge into the base in 16 bits",
        "unsloth-zoo PR #803, unsloth #4919",
    )
    QUANT_RESIDUE = error(
        "Quantisation states of weights that are not packed, or missing",
        "vLLM fails with KeyError for keys like 'weight.absmax', transformers reports unexpected "
        "keys: a merge left them behind",
        "drop these tensors: 16-bit weights do not need them",
    )
    QUANT_PARTIAL = error(
        "Packed weights without their quantisation states",
        "the packed bytes cannot be decoded: the values are lost",
        "save the quantised model again",
        "OpenRLHF #501",
    )
    QUANT_MERGED = info(
        "A model stored in 4 bits",
        "if an adapter was merged into it, its delta was rounded to 4 bits ('Merge lora module to "
        "4-bit linear may get different generations')",
        "merge into the dequantised weights and keep 16 bits: python flows/deliver.py",
        "peft #2321, peft #2105, peft #1043, unsloth-zoo PR #810",
    )


class Dtypes(Section, heading="dtypes"):
    DTYPE_MIXED = warning(
        "Weights of different dtypes",
        "loaders cast all of them to one dtype: weights that were merged or trained in a wider "
        "dtype are rounded then, after all checks",
        "cast once, at the end of the merge, to the serving dtype",
        "LLaMA-Factory #2075, OpenRLHF PR #1348",
    )
    DTYPE_NOT_CONFIG = warning(
        "Weights of another dtype than config.json says",
        "vLLM casts to the dtype of config.json: bf16 weights served as fp16 overflow, fp32 "
        "weights lose their precision",
        "set dtype in config.json to that of the weights",
        "LLaMA-Factory #2075, LLaMA-Factory #3096",
    )
    DTYPE_NOT_OF_BASE = warning(
        "Weights of another dtype than the base",
        "an exporter changed it: from bf16 to fp16 large values overflow, from fp32 to bf16 small "
        "deltas are rounded away",
        "merge again in the base's dtype",
        "LLaMA-Factory #2075, LLaMA-Factory #3096, LLaMA-Factory #10596",
    )


class Experts(Section, heading="Experts"):
    EXPERTS_INCOMPLETE = error(
        "Missing experts",
        "transformers 5 refuses with a size mismatch of the fused experts; vLLM and older loaders "
        "skip or re-initialise experts without an error, and the model generates noise",
        "save the model again, or take the missing experts from the base if they were not trained",
    )
    EXPERTS_COUNT = error(
        "Another number of experts than config.json says",
        "transformers refuses with 'size mismatch'; engines that place experts by index read past "
        "the end, or leave some empty",
        "set the number of experts in config.json to that of the weights",
    )
    EXPERTS_MIXED = error(
        "Experts in two layouts",
        "a loader reads one layout and silently skips the other: part of the model is untrained",
        "write all experts in the layout of the base",
        "1Cat-vLLM PR #21",
    )
    EXPERTS_FUSED = warning(
        "Experts fused in one tensor although the family stores one tensor per expert",
        "transformers 5 packs experts in memory; if they are saved like this, older vLLM, SGLang "
        "and quantisers do not find them",
        "write one tensor per expert, as the base does: save_pretrained of transformers 5 does so",
        "vLLM PR #36997, vLLM PR #31849, MoE-Infinity PR #108, 1Cat-vLLM PR #21",
    )


class Configuration(Section, heading="Configuration"):
    CONFIG_CHANGED = error(
        "A setting that the weights depend on differs from the base's",
        "training does not change this setting. With another value the weights compute something "
        "else: the model loads and gives worse responses, often only to long prompts",
        "take the base's value: python flows/audit.py source=DIR base=<the base> fix=true "
        "out_dir=<folder>",
    )
    CONFIG_DIFFERS = warning(
        "A setting that training may change differs from the base's",
        "context length, special tokens, tokenizer or processor differ from the base's: changed "
        "on purpose, or lost when the model was saved",
        "compare with the settings of the run; take the base's value unless the change is intended",
    )
    SETTING_TWICE = warning(
        "Two spellings of one setting with two values in config.json",
        "loaders take one of them without a word, and other versions the other: half of the "
        "readers compute something else than was trained",
        "delete the spelling with the value that is not meant",
    )
    ROPE_THETA_ABSENT = warning(
        "config.json has no rope_theta, unlike the published models of its family",
        "loaders use 10,000 without a warning. A model that was trained with another base "
        "frequency gives worse responses, most of all to long prompts",
        "add the base's rope_theta: python flows/audit.py source=DIR base=<the base> fix=true "
        "out_dir=<folder>",
    )
    ROPE_FORM = warning(
        "Rotary settings only in the format of transformers 5",
        "transformers 4, and servers built on it, do not read rope_parameters: they use the "
        "default theta and no scaling, without a warning",
        "write rope_theta and rope_scaling beside rope_parameters: python flows/audit.py "
        "source=DIR fix=true out_dir=<folder>",
        "vLLM PR #44158, vLLM PR #42624",
    )
    TOKENIZER_CLASS = warning(
        "Tokenizer settings that transformers 4 does not load",
        "'Tokenizer class TokenizersBackend does not exist or is not currently imported', or, for "
        "extra_special_tokens as a list, \"'list' object has no attribute 'keys'\": transformers 5 "
        "writes both, and older versions and servers built on them cannot load either",
        "name PreTrainedTokenizerFast, and move the list to additional_special_tokens: python "
        "flows/audit.py source=DIR fix=true out_dir=<folder>",
        "LLaMA-Factory #10310, minimind #578, QwenPaw #3084, ms-swift #8186, mlx-lm #661",
    )
    PROCESSOR_MISSING = warning(
        "A multimodal model without a processor configuration",
        "vLLM, SGLang and AutoProcessor cannot load it: 'does not appear to have a file named "
        "preprocessor_config.json'",
        "copy preprocessor_config.json and processor_config.json from the base",
        "EasyR1 PR #48, llm-compressor #1305",
    )
    ADAPTER_TEXT_NAMES = warning(
        "An adapter of a text model with a multimodal base",
        "vLLM accepts an adapter if the ends of its module names match the model's, but applies "
        "only modules whose full names match. Served with this base, the adapter has no effect "
        "and there is no warning",
        "merge it: python flows/deliver.py source=DIR base=<the base> out=<folder>; or rename its "
        "modules to those of the multimodal model",
        "vLLM #34186, vLLM #48019",
    )
