"""Findings about tensors: headers, names and shapes, ZeRO checkpoints, wrapper prefixes."""

from __future__ import annotations

from tasks.audit.finding import Section, error, info, warning


class Headers(Section, heading="Headers, names and shapes"):
    BAD_HEADER = error(
        "A weight file that is truncated, damaged, or not a weight file",
        "`SafetensorError: InvalidHeaderDeserialization` or `MetadataIncompleteBuffer` in every "
        "tool; an interrupted save or copy looks like this",
        "copy or save the file again",
        "LLaMA-Factory #1910",
    )
    NOT_WEIGHTS_YET = error(
        "A Git LFS pointer in place of the weights",
        "`InvalidHeaderDeserialization` in every tool: the repository was cloned without LFS",
        "git lfs pull",
    )
    NO_TENSORS = error(
        "A weight file without tensors: the 40-byte adapter",
        "peft loads it with a warning and the adapter has no effect; ZeRO-3 or FSDP saved the "
        "partition of one rank, which was empty",
        "save again with the parameters gathered; if DeepSpeed's shards are still there, gather "
        "them: python flows/deliver.py source=<the checkpoint> base=<the base> out=DIR",
        "peft #1443, peft #2500, peft #453, trl #4416, Flow-Factory #156",
    )
    EMPTY_TENSOR = error(
        "A tensor without elements in place of a matrix",
        "`size mismatch ... copying a param with shape torch.Size([0])` in peft and transformers, "
        "a bare `IndexError: tuple index out of range` in vLLM; ZeRO-3 saved its placeholder",
        "the values are not in this file; if DeepSpeed's shards are still there, gather them: "
        "python flows/deliver.py source=<the checkpoint> base=<the base> out=DIR",
        "OpenRLHF #651, OpenRLHF #682, OpenRLHF #920, LLaMA-Factory #7665, peft #2450, "
        "peft #1443, peft #2500, peft #453, trl #4416",
    )
    NOT_CONTIGUOUS = warning(
        "A .bin file with tensors that are not contiguous",
        "torch loads them; converters to safetensors refuse them, and so does flows/deliver.py",
        "save it again as {name: tensor.contiguous() for ...}",
    )
    NESTED_STATE_DICT = error(
        "A trainer's checkpoint under the name of a model's weights",
        "transformers and vLLM look for tensors at the top level and find none: every weight is "
        "initialised at random, with a warning",
        "save the inner dictionary alone",
    )
    NO_TENSOR_ENTRY = warning(
        "A .bin file with entries that are not tensors",
        "`torch.load(weights_only=True)` refuses unknown classes; loaders treat each entry as a "
        "tensor",
        "save only model.state_dict()",
    )
    TENSOR_MISSING = error(
        "Tensors of the model's class that are missing in the files",
        "transformers initialises them at random with a warning; vLLM stops with `Following "
        "weights were not initialized from checkpoint`",
        "take them from the base if training did not change them; else save again",
        "OpenRLHF #1232, OpenRLHF #180, OpenRLHF #209, Megatron-Bridge #4107",
    )
    TENSOR_UNEXPECTED = warning(
        "Tensors that do not belong to the model's class",
        "transformers ignores them, vLLM stops: `There is no module or parameter named ...`",
        "remove them, or set the class in config.json that they belong to",
        "unsloth #1770",
    )
    SHAPE_MISMATCH = error(
        "Tensors whose shape disagrees with config.json",
        "`size mismatch for ...` in transformers, an assertion in vLLM's weight loader",
        "take the config.json that was saved with the weights",
        "OpenRLHF #682, LLaMA-Factory #3125",
    )
    CONTRACT_UNKNOWN = warning(
        "transformers cannot build a model from config.json, so names and shapes were not checked",
        "`AutoModel.from_pretrained` fails the same way; vLLM may have a class of its own",
        "install the transformers version that saved the model, or correct config.json",
    )


_GATHER = "python flows/deliver.py source=DIR base=<the base, for an adapter> out=<folder>"


class Zero(Section, heading="DeepSpeed ZeRO checkpoints"):
    ZERO_NOT_GATHERED = info(
        "A DeepSpeed checkpoint: fp32 partitions of every rank, not a model yet",
        "transformers, peft and vLLM find no weights in it; its trainer can resume from it",
        _GATHER,
        "LLaMA-Factory #2604, LLaMA-Factory #2161",
    )
    ZERO_NOT_ALL_READ = warning(
        "A DeepSpeed checkpoint of so many ranks that their files were counted, not read",
        "files of different steps or world sizes would go unnoticed; gathering reads all of them "
        "before it writes, and refuses files that do not fit",
        _GATHER,
    )
    ZERO_BESIDE = info(
        "DeepSpeed's shards beside the saved weights",
        "if the saved weights are wrong, the shards still have the right values",
        _GATHER,
    )
    ZERO_RANK_MISSING = error(
        "Files of some ranks are missing",
        "`zero_to_fp32.py` and a resume stop; partitions of every tensor are in the missing "
        "files. Without a shared file system each node keeps its own files",
        "copy the files of all ranks of one step into the folder",
    )
    ZERO_STEPS_MIXED = error(
        "Files of several steps or runs in one checkpoint",
        "`zero_to_fp32.py` combines them without a warning into a model that never existed",
        "use the folder of another step",
    )
    ZERO_WORLD_DISAGREES = error(
        "Files of runs with different numbers of ranks, or different ZeRO stages",
        "partitions for different numbers of ranks do not fit together; a smaller run overwrote "
        "an older save",
        "keep the files of one run",
        "OpenRLHF #1067",
    )
    ZERO_LATEST_DANGLING = error(
        "The file `latest` names a step that does not exist, or is missing with several steps",
        "a resume stops, or silently starts from the beginning",
        "pass the folder of the step: source=DIR/global_step<N>",
        "OpenRLHF PR #1208",
    )
    ZERO_PARALLEL = error(
        "States of tensor, pipeline or expert parallel training",
        "they are partitioned in another way than ZeRO's, and Plumbline does not read them",
        "convert them with the trainer that wrote them",
    )
    ZERO_EMPTY = error(
        "Parameters without data on any rank",
        "gathering gives a model with missing values",
        "save with exclude_frozen_parameters=False, or pass the base that they come from: base=DIR",
    )
    ZERO_UNUSABLE = error(
        "Files of a DeepSpeed checkpoint that cannot be read, or do not fit together",
        "neither a resume nor `zero_to_fp32.py` can make a model of them",
        "copy the files of every rank of one step again, or use another step",
    )
    PARTITIONS_WHOLE = info(
        "Plumbline's partitions of every rank, complete, not a model yet",
        "transformers, peft and vLLM find no weights in it",
        _GATHER,
    )
    PARTITIONS_UNUSABLE = error(
        "Plumbline's partitions that do not give full tensors",
        "they cannot be gathered",
        "copy the files of every rank again, or train again from the last checkpoint",
    )


_FIX = "python flows/audit.py source=DIR fix=true out_dir=<folder>"


class Residue(Section, heading="Wrapper prefixes in key names"):
    PEFT_RESIDUE = error(
        "PEFT wrapper names in the keys of a full model",
        "transformers initialises every layer at random with a warning; `There is no module or "
        "parameter named 'base_model'` in vLLM. The wrapped model was saved instead of the merged "
        "one",
        f"if only prefixes are left: {_FIX}; if lora_A and lora_B are among the keys, the "
        "adapter was never merged: save it as an adapter, and deliver that",
        "OpenRLHF #991, OpenRLHF #920, OpenRLHF #1081",
    )
    WRAPPER_RESIDUE = error(
        "Key prefixes of DeepSpeed, torch.compile or FSDP",
        "loaders find no key that they know: transformers initialises the model at random with a "
        "warning, vLLM stops",
        _FIX,
        "OpenRLHF #991, Soup #335, axolotl #2744",
    )
    TRL_RESIDUE = error(
        "The key prefix of TRL's model with a value head",
        WRAPPER_RESIDUE.why,
        _FIX,
        "OpenRLHF #991",
    )
    ADAPTER_NAME_IN_KEYS = error(
        "The adapter's name in the keys of its file",
        "peft finds none of its tensors, warns, and continues with an adapter without effect; "
        "vLLM stops at an unsupported LoRA weight",
        f"{_FIX}; or save it with save_pretrained, which removes the name",
        "peft #2500",
    )
    ADAPTER_PREFIX = error(
        "Keys of an adapter without PEFT's prefix",
        "peft finds none of its tensors and warns; vLLM stops at an unsupported LoRA weight",
        f"keys have to begin with base_model.model.; {_FIX}",
    )
