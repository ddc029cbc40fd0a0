"""Findings about tensor data, and about differences from the base and the adapter."""

from __future__ import annotations

from tasks.audit.finding import Section, error, info, warning


class AgainstBase(Section, heading="Comparison with the base"):
    WRONG_BASE = error(
        "Not made from this base",
        "an adapter on another base raises no error if the shapes agree, and generates garbage: "
        "correct before the merge, wrong after it",
        "pass the base that the training run used",
        "LLaMA-Factory #4913, LLaMA-Factory #2505, LLaMA-Factory #5930",
    )
    BASE_NAME = warning(
        "Another base than adapter_config.json names",
        "an adapter merges silently into a wrong base of the same shapes",
        "pass the base of that name, or correct base_model_name_or_path",
        "LLaMA-Factory #4913, LLaMA-Factory #6105",
    )
    MERGED_EQUALS_BASE = error(
        "Every tensor equals the base's",
        "nothing was merged: verl's merger writes LoRA to a separate folder; LLaMA-Factory "
        "exports the base if export_size gives files of the base's size",
        "merge the adapter: python flows/deliver.py source=ADAPTER base=BASE",
        "LLaMA-Factory #9051, LLaMA-Factory #6105, verl #7285, verl #4553, verl #3087",
    )
    BASE_TENSORS_LOST = error(
        "Tensors of the base that are missing",
        "transformers initialises them at random with a warning; vLLM fails, or leaves them "
        "empty: 'Following weights were not initialized from checkpoint'",
        "copy them from the base: a merge with python flows/deliver.py keeps all of them",
        "transformers #40968, OpenRLHF #1232",
    )
    NORM_DIFFERS = error(
        "Matrices whose norm is less than half or more than twice that of the base's",
        "training changes norms by a few percent: 8-bit numbers were stored without their scales, "
        "or the tensor was initialised again. Nothing fails, but responses are garbage",
        "merge again from the base: python flows/deliver.py source=<the adapter> "
        "base=<the base> out=<folder>",
        "unsloth-zoo PR #803, unsloth #4919",
    )


_AGAIN = (
    "merge again from the base: python flows/deliver.py source=<the adapter> base=<the base> "
    "out=<folder>"
)


class Merges(Section, heading="Merged models, value by value"):
    MERGE_LEFT_OUT = error(
        "The adapter changes these tensors, but the merged model has the base's values",
        "the model is only partly the trained one. Nothing fails, but responses are worse",
        _AGAIN,
    )
    MERGE_TWICE = error(
        "The adapter was added twice",
        "the change is twice as large as the trained one. Nothing fails. It happens when an "
        "adapter is merged into a model that already contains it",
        _AGAIN,
    )
    MERGE_SCALE = error(
        "The adapter was added with a wrong scale",
        "the change is not the trained one. Nothing fails. The scale is lora_alpha / r, or "
        "lora_alpha / sqrt(r) with use_rslora; rank_pattern and alpha_pattern change both by "
        "module",
        _AGAIN,
    )
    MERGE_TRANSPOSED = error(
        "A square matrix is stored transposed",
        "the shape is the same, so the model loads everywhere, but its responses are garbage",
        "transpose it, or merge again from the base",
    )
    MERGE_EXPERTS = error(
        "The experts are not in the order of the base",
        "shapes are the same, so the model loads everywhere, but its router picks the wrong "
        "experts",
        _AGAIN,
    )
    MERGE_CHANGED = error(
        "The values are not the base plus the adapter's change",
        "these tensors match neither the merge nor the base: rows were cut or permuted, another "
        "adapter was merged, or the file is damaged",
        _AGAIN,
    )
    MERGE_UNTOUCHED = error(
        "Tensors changed that the adapter does not touch",
        "the model has changes that do not come from this adapter, or the base is another one",
        "pass the base and the adapter that were merged, or merge again",
    )
    MERGE_MISSING = error(
        "Tensors are missing in the merged model",
        "transformers initialises them at random with a warning. An embedding that training "
        "untied from the output head is lost",
        _AGAIN,
    )
    MERGE_PARTIAL = warning(
        "Some layers equal the base's bit for bit, and others of the same kind do not",
        "a merge that stopped halfway looks like this, and so does training of only some layers",
        "pass the adapter to check every tensor: python flows/audit.py source=DIR base=<the base> "
        "adapter=<the adapter> values=true",
    )
    MERGE_MIXED_BASE = warning(
        "Merged partly into the dequantised base and partly into the original",
        "an adapter fits only one of the two: the one that was loaded in training",
        _AGAIN,
    )
    MERGE_DEQUANTIZED = info(
        "Merged into the dequantised base",
        "right for an adapter that was trained with 4-bit weights (QLoRA), wrong for any other",
        "nothing, if training loaded the base in 4 bits",
    )
    MERGE_ROUNDED_AWAY = warning(
        "Rounding threw away part of what the adapter learned",
        "the sum was rounded to nearest, as peft and all tools that cast it do: a change below "
        "half a step of the format vanishes, and the served model is closer to the base",
        f"{_AGAIN}, which rounds without bias; or serve the adapter beside its base",
    )
    MERGE_ONE_STEP = info(
        "Few weights differ from the base's, and most of those by one step of their format",
        "a merge of a light adapter that was rounded to nearest looks like this, and so does "
        "training in 16 bits without fp32 master weights: most of the update is lost",
        "pass the adapter to measure it: python flows/audit.py source=DIR base=<the base> "
        "adapter=<the adapter> values=true",
    )
    MERGE_PROVEN = info(
        "Every tensor is base + scale * B A, or the base's",
        "every element was compared; differences are within the rounding of the dtypes",
        "nothing",
    )
    MERGE_NOT_PROVEN = warning(
        "Tensors that could not be compared with base and adapter",
        "these tensors may be wrong",
        "pass a merged model and a base in bf16, fp16 or fp32, and the adapter as PEFT saved it",
    )


class Values(Section, heading="Values (of adapters up to 2 GB; of others with values=true)"):
    NOT_FINITE = error(
        "Elements that are infinite or NaN",
        "a single one is enough: every logit becomes NaN, vLLM samples token 0 and writes `!!!!`",
        "use an earlier checkpoint; the run had diverged",
        "OpenRLHF #1120",
    )
    LORA_B_ZERO = error(
        "All lora_B are zero: the adapter is untrained and has no effect",
        "the merged model is the base, bit for bit. Training did not reach it, or ZeRO-3 saved it "
        "before the parameters were gathered",
        "use a trained checkpoint; compare its step with this one's",
    )
    ALL_ZERO = warning(
        "A matrix of zeros",
        "the layer outputs nothing: memory was saved before it was filled. An error for the "
        "projections, embeddings and output heads of a model, unless both outputs of a block are "
        "zero: such a block passes its input on (LLaMA-Pro)",
        "compare it with the base, and save again; copy a base from its origin again",
        "aprender #3971",
    )
    CONSTANT_ROWS = warning(
        "Rows of a matrix in which all elements are equal",
        "the rows were appended or reset and never trained",
        "compare them with the base",
    )
    DEAD_EMBEDDING = warning(
        "Tokens whose embedding is zero",
        "the token was reserved or added and never trained: in a template it tells the model "
        "nothing, and training starts from zero",
        "use tokens that the base was trained with, or train the embeddings too (modules_to_save)",
        "OpenRLHF #645, OpenRLHF PR #648",
    )
    TIED_HEAD_DIFFERS = error(
        "config.json ties output and input embedding, but the files contain two different ones",
        "vLLM and transformers drop lm_head.weight and use the embedding: the model repeats one "
        "token",
        'set "tie_word_embeddings": false: python flows/audit.py source=DIR fix=true '
        "out_dir=<folder>",
        "transformers #45127, vLLM PR #6758",
    )
    DTYPE_RANGE = warning(
        "Values beyond the range of fp16",
        "serving with dtype=float16, or quantisation methods that compute in fp16, turn them into "
        "infinities",
        "serve in bfloat16",
    )
    SHA256_DIFFERS = error(
        "Data that differs from the manifest",
        "the data is not what was checked and measured",
        "make the artifact again, or restore it from its origin",
    )
