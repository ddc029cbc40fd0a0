"""Reported failures that leave no trace in files, and where they show instead."""

from __future__ import annotations

from dataclasses import dataclass

_RUN = "it happens while a program runs and leaves no file"
_SAVE = "saving fails, so there is no checkpoint to audit"


@dataclass(frozen=True)
class Unseen:
    """A reported failure that an audit of files cannot find.

    Attributes:
        issues: public reports of it, as "project #number".
        what: what happened.
        reason: why files do not show it, and what does.
    """

    issues: tuple[str, ...]
    what: str
    reason: str


def _of(**numbers: str) -> tuple[str, ...]:
    """Return issues as "project #number" from `OpenRLHF="58 PR335"`; `_` stands for `-`."""
    return tuple(
        f"{project.replace('_', '-')} {'PR ' if n.startswith('PR') else ''}#{n.lstrip('PR')}"
        for project, issues in numbers.items()
        for n in issues.split()
    )


UNSEEN: tuple[Unseen, ...] = (
    Unseen(
        _of(LLaMA_Factory="10757 PR9617"),
        "PPO asks for trl<=0.9.6 and refuses to start",
        "it depends on installed versions, which a checkpoint does not record",
    ),
    Unseen(
        _of(LLaMA_Factory="5936 6373", OpenRLHF="157"),
        "incompatible versions of TRL, PEFT and a trainer raise errors",
        _RUN,
    ),
    Unseen(
        _of(LLaMA_Factory="2189 2703 3238"),
        "the trainer or exporter crashes: shapes of replaced heads, a file that is still "
        "mapped, offloaded tensors",
        f"{_SAVE}; an incomplete one gives WEIGHTS_MISSING",
    ),
    Unseen(
        _of(LLaMA_Factory="10410 10230 PR10438"),
        "save_pretrained of transformers 5 raises NotImplementedError for a conversion that "
        "it cannot reverse",
        f"{_SAVE}; an incomplete one gives WEIGHTS_MISSING",
    ),
    Unseen(
        _of(
            MiniCPM_V="502",
            peft="1388 1836",
            torchtune="1101",
            unsloth="3091",
            LLaMA_Factory="3096",
        ),
        "the merged model differs slightly from base and adapter",
        "rounding a delta to bf16 or fp16 gives valid weights; flows/deliver.py measures the drift",
    ),
    Unseen(
        _of(LLaMA_Factory="10596"),
        "the merged model in vLLM gives worse responses than base and adapter behind an API",
        "it shows only when both run: flows/deliver.py compares them. Likely causes are findings: "
        "DTYPE_NOT_OF_BASE, TEMPLATE_NOT_OF_BASE",
    ),
    Unseen(
        _of(LLaMA_Factory="2505 5930 8501 9346"),
        "correct before the merge and garbage after it, with LoRA under ZeRO, Gemma 2, remote "
        "code, or a newer transformers",
        "causes that files show are EMPTY_TENSOR, WRONG_BASE and REMOTE_CODE; numerical faults of "
        "a model class show in the drift that flows/deliver.py measures",
    ),
    Unseen(
        _of(LLaMA_Factory="6020"),
        "good after the merge, bad after the conversion to GGUF",
        "the audit does not read GGUF files and Ollama's Modelfile",
    ),
    Unseen(
        _of(OpenRLHF="747 PR1316 501 58"),
        "saving is refused: tied keys, quantised keys, a 4-bit model",
        _SAVE,
    ),
    Unseen(
        _of(OpenRLHF="295 403", DeepSpeed="5195", transformers="29303"),
        "`.to` is not supported for 4-bit models when the engine starts",
        _RUN,
    ),
    Unseen(
        _of(OpenRLHF="1126 460 1135"),
        "collectives time out while a model is saved",
        "a job that died while saving gives EMPTY_TENSOR, WEIGHTS_MISSING or a truncated "
        "file; the time-out itself leaves nothing",
    ),
    Unseen(
        _of(OpenRLHF="PR1265 PR1333 PR1357"),
        "the wrong checkpoint is kept or deleted, or updates of an averaged model are lost",
        "the checkpoint that is left is valid; only the run that made it knows of a better one",
    ),
    Unseen(
        _of(
            OpenRLHF="546 991 1081 870 1150 PR1348 660 726 621 1193 PR335 PR869 739 970 PR723 606 "
            "997 1153"
        ),
        "syncing weights to vLLM fails: wrong names, dtypes or order, or they do not arrive",
        f"{_RUN}; names that reach a file are PEFT_RESIDUE",
    ),
    Unseen(
        _of(OpenRLHF="1103 928 1067 PR891 1200 PR1350 PR1337 PR1208"),
        "a resumed run skips samples, is off by one step, or crashes",
        "the state of a data loader is not part of a checkpoint's weights; a `latest` file "
        "that names no folder is ZERO_LATEST_DANGLING",
    ),
    Unseen(
        _of(trl="2514 5217 PR6356", transformers="47254", DeepSpeed="4332 PR8130 PR8148"),
        "LoRA, ZeRO-3 and non-reentrant checkpointing: 'Recomputed values ... have different "
        "metadata'",
        _RUN,
    ),
    Unseen(
        _of(peft="2603"),
        "LoRA with trainable_token_indices fails under ZeRO-3 when the model is wrapped",
        _RUN,
    ),
    Unseen(
        _of(OpenRLHF="1225 PR1233 PR1234 PR1253 343 1049"),
        "optimisers and schedulers that crash or hang",
        _RUN,
    ),
    Unseen(
        _of(OpenRLHF="352 973 1311"),
        "the model learnt the wrong thing: always EOS, a token outside the loss, pairs without a "
        "difference",
        "the weights are valid; the data was not",
    ),
    Unseen(
        _of(vLLM="34591 41754 55193 42008 49063 55545 PR41384", sglang="PR27381 PR21864"),
        "a server responds with the base under an adapter's name, or applies part of the adapter",
        "the files are correct: flows/deliver.py merges the adapter and measures what vLLM serves",
    ),
    Unseen(
        _of(
            verl="7495 PR7453",
            verl_omni="552",
            trl="5312",
            vLLM="32718",
            miles="PR1087",
            xtuner="PR2044",
        ),
        "RL rollouts are sampled with weights that are not the trainer's",
        "no file is written; an online run checks vLLM's weights after each sync and before each "
        "request",
    ),
    Unseen(
        _of(sglang="35797", transformers="48154", unsloth="7792"),
        "a loader or converter changes the model: MTP dropped, other embeddings, GGUF",
        "the files are correct; flows/deliver.py compares what is served with what was trained",
    ),
    Unseen(
        _of(aprender="507"),
        "another checker's --strict had no effect",
        "a failure of that tool, not of a checkpoint",
    ),
)
