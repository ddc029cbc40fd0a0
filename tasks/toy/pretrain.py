"""Pre-train the toy base, a Qwen2 model of about 1M parameters.

The number of steps and the number of threads are fixed, so the same seed gives bit-identical
weights on the same machine. The command `python -m tasks.toy.pretrain job.json` reads a JSON object
`{"out": folder, "steps": int, "seed": int}`, and prints progress and results as events.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.events import emit
from tasks.process.torch_process import end_process, start_lean
from tasks.toy import CONTEXT, SHAPE, VOCABULARY
from tasks.toy.splits import corpus

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

END_OF_TEXT, START, END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, START, END, PAD)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + ' ' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)

THREADS = 2
"""Fixed, because another number of threads rounds sums differently."""
BATCH = 32
"""Small: 400 steps of 32 learn more in the same time than 220 of 64."""
PEAK_LR = 3e-3
WARMUP_STEPS = 20
TOKENIZER_SAMPLE = 4000
REPORT_EVERY = 25
IGNORED = -100


def pretrain(out: Path, *, steps: int, seed: int) -> dict[str, Any]:
    """Make the base model and its tokenizer, and save both into `out` as a Hugging Face folder.

    Returns "parameters", "steps", and "loss": mean of the last report, in nats per token.
    """
    import torch
    from transformers import GenerationConfig, set_seed

    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    # Filling is for debugging, and takes 10 % of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False
    pairs = corpus(max(TOKENIZER_SAMPLE, steps * BATCH), seed=seed)
    texts = [text for pair in pairs[:TOKENIZER_SAMPLE] for text in pair]
    tokenizer = train_tokenizer(texts, context=CONTEXT)
    set_seed(seed)
    model = build_model(tokenizer)
    loss = _optimise(model, _batches(pairs[: steps * BATCH], tokenizer), steps=steps)
    model.eval().to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "steps": steps, "loss": loss}


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Return the untrained model, in float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        **SHAPE,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    return Qwen2ForCausalLM(config)


def _batches(
    pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (input ids, labels), each [BATCH, longest]; labels skip prompts and padding.

    Rows keep the order of the corpus. Sorted by length, each batch would have a single task, which
    learns worse.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    prompts = tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question, _ in pairs],
        tokenize=False,
        add_generation_prompt=True,
    )
    wholes = [
        f"{prompt} {answer}{tokenizer.eos_token}"
        for prompt, (_, answer) in zip(prompts, pairs, strict=True)
    ]
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    whole_ids = tokenizer(wholes, add_special_tokens=False)["input_ids"]
    for start in range(0, len(pairs), BATCH):
        rows = list(map(torch.tensor, whole_ids[start : start + BATCH]))
        inputs = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
        labels = pad_sequence(rows, batch_first=True, padding_value=IGNORED)
        for row, prompt in enumerate(prompt_ids[start : start + BATCH]):
            labels[row, : len(prompt)] = IGNORED
        yield inputs, labels


def _optimise(
    model: Qwen2ForCausalLM,
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    *,
    steps: int,
) -> float:
    """Train with AdamW in float32, and return the last reported mean loss, in nats per token."""
    import torch
    from torch.nn.functional import cross_entropy

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01, foreach=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    model.train()
    mean, seen = math.nan, []
    for step, (inputs, labels) in enumerate(batches, start=1):
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen.append(loss.item())
        if step % REPORT_EVERY == 0 or step == steps:
            mean, seen = sum(seen) / len(seen), []
            emit("progress", stage="prepare", step=step, total=steps, loss=round(mean, 4))
    return mean


def _rate(step: int, steps: int) -> float:
    """Return the learning rate as a share of its peak: warm-up, then cosine decay to 2 %."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def train_tokenizer(texts: Iterable[str], *, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer: any text can be encoded, and digits are single tokens.

    The same texts give the same tokenizer, byte for byte. The toy is a Qwen2, whose tokenizer
    transformers builds itself, so tokenizer.json has the steps that it builds.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    roles = ("system", "user", "assistant")
    core.train_from_iterator((f"{role} {text}" for text in texts for role in roles), trainer)
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


if __name__ == "__main__":
    # transformers would import both only to check whether they are in use, which takes 4 s.
    start_lean("deepspeed", "peft")
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    emit("pretrained", **pretrain(Path(job["out"]), steps=job["steps"], seed=job["seed"]))
    end_process()
