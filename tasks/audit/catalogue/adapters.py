"""Findings about PEFT adapters, and about models and adapters that vLLM refuses."""

from __future__ import annotations

from tasks.audit.finding import Section, error, info, warning


class Adapters(Section, heading="Adapters, their configuration and their base"):
    ADAPTER_TYPE = warning(
        "An adapter that is not LoRA",
        "vLLM serves only LoRA; Plumbline checks and merges only LoRA",
        "merge it with peft's merge_and_unload, and audit the merged model",
    )
    ADAPTER_CONFIG = error(
        "Invalid settings in adapter_config.json",
        "peft and vLLM refuse to load the adapter",
        "restore the adapter_config.json of the run that trained it",
    )
    ADAPTER_HALF_PAIR = error(
        "One half of a LoRA pair",
        "peft initialises the other half and only warns ('Found missing adapter keys'): the "
        "module is untrained, or random",
        "save the adapter again from the training run",
        "OpenRLHF #651",
    )
    ADAPTER_RANK = error(
        "Ranks of tensors that disagree with adapter_config.json",
        "peft refuses to load it with 'size mismatch'; if only alpha / r is wrong, the adapter is "
        "applied with the wrong scale",
        "restore the adapter_config.json of the run that trained it",
    )
    ADAPTER_ALPHA = error(
        "A lora_alpha with which the adapter has no effect",
        "the delta is lora_alpha / r times B A: with 0 the served model is the base. verl's "
        "merger writes 0 if it does not find the training metadata",
        "set lora_alpha to the value of the training run",
        "verl PR #1821, verl PR #5326, verl #7285",
    )
    ADAPTER_PATTERN = warning(
        "A key of rank_pattern or alpha_pattern that matches none of the adapter's modules",
        "a pattern without effect: peft scales the modules that it was meant for by lora_alpha / r "
        "and says nothing; if their names changed after training, the scale is wrong",
        "correct the names, or remove the key if training did not use it either",
    )
    ADAPTER_TARGET_ABSENT = warning(
        "A target module without saved tensors",
        "peft initialises tensors that are not in the file and only warns: if the base has such "
        "modules, their training is lost",
        "run the audit with base=DIR to see whether the base has such modules",
        "OpenRLHF #651",
    )
    ADAPTER_COVERAGE = error(
        "Target modules of the base without a LoRA pair",
        "peft initialises them and only warns, axolotl's merge does not even warn: the model is "
        "partly trained and partly the base",
        "save the adapter again from the training run, with all of its tensors gathered",
        "OpenRLHF #651, OpenRLHF #682, ms-swift #6481",
    )
    ADAPTER_GAPS = warning(
        "Layers without the LoRA pair that other layers have",
        "if the base has these modules, peft initialises them and only warns",
        "run the audit with base=DIR to see whether the base has such modules there",
        "OpenRLHF #651",
    )
    ADAPTER_NO_MODULE = error(
        "LoRA pairs for modules that the base does not have",
        "peft silently drops them, vLLM refuses the adapter: it was trained on another base",
        "pass the base that adapter_config.json names",
        "LLaMA-Factory #4913",
    )
    ADAPTER_MODULE_NAMES = error(
        "LoRA pairs under other names than the base's modules have",
        "peft finds none of its tensors in the file and only warns ('Found missing adapter keys'): "
        "the model answers as the base. vLLM serves it the same way, or refuses it",
        "save the adapter with save_pretrained from the model that was trained, or rename its keys",
        "vLLM #34186, peft #2566, ms-swift #5621, ms-swift #8031",
    )
    ADAPTER_SHAPE = error(
        "LoRA pairs whose sizes do not fit the base",
        "peft and vLLM refuse to load it with 'size mismatch': it was trained on another base",
        "pass the base that adapter_config.json names",
        "LLaMA-Factory #4913",
    )
    ADAPTER_NO_MERGE = error(
        "An adapter that cannot be merged into this base",
        "`deliver` plans the merge from the same headers and refuses it; peft fails with 'size "
        "mismatch', or drops tensors with a warning",
        "pass the base that adapter_config.json names, or save the adapter again from the training "
        "run",
        "Automodel #3233",
    )
    ADAPTER_VOCABULARY = warning(
        "Embeddings in the adapter with another number of rows than the base",
        "the vocabulary grew in training: peft fails with 'size mismatch for "
        "...embed_tokens.modules_to_save.default.weight' unless the base is resized first",
        "resize the base to the adapter's rows before peft loads it, or merge with python "
        "flows/deliver.py source=DIR base=BASE, which uses the adapter's rows",
        "LLaMA-Factory #3125, LLaMA-Factory #5262, LLaMA-Factory #3154, LLaMA-Factory #10186",
    )
    ADAPTER_DORA = error(
        "use_dora and DoRA's magnitudes disagree",
        "with use_dora and no magnitudes peft uses the base's norms and only warns, without "
        "use_dora it silently drops them: either way the merged model is not the trained one",
        "restore use_dora of the training run, or the tensors lora_magnitude_vector",
    )
    ADAPTER_SAVED_ABSENT = error(
        "Names in modules_to_save without saved tensors",
        "peft 0.21 fails with KeyError; earlier versions keep the base's weights and only warn: "
        "the modules that were trained in full are lost",
        "save the adapter again from the training run, with these modules gathered",
        "LLaMA-Factory #7665, peft #2450",
    )
    ADAPTER_UNEXPLAINED = warning(
        "Tensors that adapter_config.json does not explain",
        "peft silently drops them, vLLM refuses them as 'unsupported LoRA weight'",
        "restore the settings (modules_to_save, bias, trainable_token_indices) of the training run",
    )
    ADAPTER_TOKENS = error(
        "Trained token rows and their indices disagree",
        "peft fails to load the rows, or assigns them to the wrong tokens",
        "restore trainable_token_indices of the training run",
    )
    ADAPTER_PARTS_TIE = warning(
        "An adapter that changes one of two tied embeddings",
        "after a merge input and output embedding differ; if tie_word_embeddings stays true, "
        "loaders use one for both and the model repeats a token",
        "merge with python flows/deliver.py source=DIR base=BASE, which unties the two, or set "
        "tie_word_embeddings to false in the merged config.json",
        "transformers #45127",
    )
    ADAPTER_INIT = warning(
        "An initialiser that changed the base's weights",
        "the adapter fits the base as training changed it, not the published one: merging it into "
        "the published base gives a wrong model, and vLLM refuses the adapter",
        "save it as a plain LoRA with save_pretrained(..., "
        "path_initial_model_for_weight_conversion=INITIAL_ADAPTER)",
    )
    ADAPTER_BASE_UNSAID = warning(
        "adapter_config.json does not name the base",
        "merging into a wrong base of the same shapes raises no error anywhere",
        "write base_model_name_or_path (and revision) into adapter_config.json",
        "LLaMA-Factory #4913",
    )
    ADAPTER_IS_NO_MODEL = info(
        "An adapter, which is not a model by itself",
        "an engine that gets it as a model fails: 'No supported config format found' (unsloth), a "
        "missing config.json (vLLM), a traceback (LLaMA-Factory)",
        "serve it beside its base (vllm serve BASE --enable-lora --lora-modules NAME=DIR), or "
        "merge it: python flows/deliver.py source=DIR base=BASE out=OUT merge.base=original, or "
        "dequantized for QLoRA",
        "unsloth #1191, LLaMA-Factory #4896, LLaMA-Factory #7511",
    )
    ADAPTER_ROUNDS_AWAY = info(
        "Merging this adapter with rounding to nearest loses part of it",
        "peft and all tools that cast the sum round to nearest: changes below half a step of the "
        "format vanish, and the merged model is closer to the base than the trained one",
        "merge it with python flows/deliver.py source=DIR base=BASE out=OUT, which rounds without "
        "bias, or serve it beside its base; with other tools save the merged model in float32",
    )
    CONFIG_BESIDE_ADAPTER = warning(
        "A model's config.json in an adapter's folder",
        "engines treat the folder as a full model and find no weights, or load adapter_model as "
        "one. OpenRLHF writes the base's config.json into every adapter",
        "remove config.json from the adapter's folder",
        "LLaMA-Factory #4896, LLaMA-Factory #7511",
    )
    QLORA_BASE = warning(
        "An adapter that was trained on a 4-bit base",
        "4-bit weights differ from the 16-bit ones by more than most adapters change them: merged "
        "into the 16-bit base, the model is not the trained one",
        "merge into the dequantised 4-bit base: python flows/deliver.py source=DIR base=BASE_4BIT",
        "unsloth-zoo PR #810, peft #2321, peft #2105, peft #1043",
    )
    BASE_QUANTISED = error(
        "A base whose quantised weights cannot be decoded",
        "the adapter can neither be merged into such weights nor compared with them",
        "take the unquantised model that it was made from: python flows/deliver.py source=DIR "
        "base=ORIGINAL out=OUT",
        "ms-swift #7907, LLaMA-Factory #10328",
    )


_MERGE = "merge it before serving: python flows/deliver.py source=DIR base=BASE"


class Serving(Section, heading="Refused by vLLM"):
    VLLM_ARCHITECTURE = error(
        "A class that vLLM does not have",
        "vLLM refuses: 'Model architectures [...] are not supported for now'",
        "name the class of the base; a reward model is a *ForSequenceClassification with "
        "num_labels 1",
        "OpenRLHF #1039, LLaMA-Factory #4379",
    )
    VLLM_LORA_RANK = warning(
        "A rank above vLLM's default limit",
        "vLLM refuses: 'LoRA rank 64 is greater than max_lora_rank 16'",
        "start vLLM with --max-lora-rank of at least this rank",
        "vLLM #2847, LLaMA-Factory PR #3794, gpustack #5438",
    )
    VLLM_LORA_DORA = warning(
        "An adapter with DoRA",
        "vLLM refuses: 'vLLM does not yet support DoRA', in older versions 'lora_magnitude_vector "
        "is unsupported LoRA weight'",
        _MERGE,
        "vLLM #6983",
    )
    VLLM_LORA_MODULES_TO_SAVE = warning(
        "Modules that are stored in full (modules_to_save)",
        "vLLM accepts only a classification head in an adapter: 'base_model.model.lm_head.weight "
        "is unsupported LoRA weight'",
        _MERGE,
        "vLLM #9280, vLLM #4186, vLLM #32599, vLLM #7441",
    )
    VLLM_LORA_KEY = warning(
        "Tensors whose names vLLM's adapter loader does not know",
        "vLLM refuses the adapter: '... is unsupported LoRA weight'",
        _MERGE,
        "vLLM #21500",
    )
    VLLM_LORA_TOWER = warning(
        "LoRA pairs on a vision or audio tower",
        "vLLM adapts only the language model of a multimodal model: other pairs are refused as "
        "unsupported, or ignored, unless the engine is started with tower adapters",
        f"train with target_modules of the language model alone, or {_MERGE}",
        "vLLM #21500",
    )
    VLLM_LORA_FEATURE = warning(
        "A peft setting that vLLM does not support", "vLLM refuses to load the adapter", _MERGE
    )
