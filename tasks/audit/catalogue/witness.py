"""Findings about a record of the live model (`plumbline.witness`) beside a checkpoint's files."""

from __future__ import annotations

from tasks.audit.finding import Section, error, info, warning

_AGAIN = "copy the checkpoint again from the machine that trained it, with this file"


class Records(Section, heading="The record of the trained model"):
    WITNESS = info(
        "A record of the live model, and the files that agree with it",
        "the trainer's own process wrote it. It proves what was trained, not what the weights in "
        "this folder or a server compute: deliver and verify compare these",
        "compare the weights: python flows/deliver.py source=DIR base=<the base> out=<a new "
        "folder>; compare a server: python flows/verify.py url=<its address> source=DIR",
    )
    WITNESS_UNREADABLE = warning(
        "A record that is incomplete or of a newer format",
        "nothing can be compared with it; deliver refuses the checkpoint",
        "copy the folder plumbline.witness again, or remove it",
    )
    WITNESS_ADAPTER = error(
        "Settings in adapter_config.json that are not those of the training",
        "a changed r, lora_alpha or rsLoRA changes the adapter's scale, changed targets leave "
        "modules out: every loader accepts both silently",
        "restore the adapter_config.json of the run that trained it",
        "vLLM #55545, vLLM PR #41384",
    )
    WITNESS_TEMPLATE = warning(
        "A chat template that is not the one of the training",
        "the served model reads other tokens around each message than it was trained on",
        _AGAIN,
        "trl #6361, ms-swift #9168",
    )
    WITNESS_TOKENIZER = warning(
        "A tokenizer that is not the one of the training",
        "a text becomes other tokens than in training, or an id stands for another token",
        _AGAIN,
    )
    WITNESS_GENERATION = warning(
        "Generation settings that are not those of the training",
        "vLLM samples with the temperature, top_k and top_p of generation_config.json and stops at "
        "its EOS: responses differ, or never end",
        "write the recorded values into generation_config.json",
        "verl #7198, EasyR1 PR #11007",
    )
    WITNESS_BASE = warning(
        "A base whose tensors are not those of the training",
        "it is another model, another revision, or the same in another precision: the merged "
        "model is not the one that was trained",
        "give the base that the record names",
    )
    WITNESS_QUANTISATION = warning(
        "A base that is stored in another way than in training",
        "an adapter that was trained on 4-bit weights compensates for their rounding, and is off "
        "by that rounding on 16-bit weights",
        "merge into the dequantized base, which deliver does if it finds the record: python "
        "flows/deliver.py source=DIR base=<the base> out=<a new folder>",
    )
