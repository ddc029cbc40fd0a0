"""Fingerprints and greedy tokens of a model that transformers has loaded.

Everything runs one sequence at a time, without padding and without an attention mask: that is how
the training engine measures itself, and only the same arithmetic gives the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from tasks.errors import DriftError
from tasks.fingerprint import TOP_K, Fingerprint, largest_steps

ALTERNATIVES = 5
"""Candidates reported for every greedy step, the chosen token included."""


@torch.no_grad()
def fingerprint(model: Any, reference: Fingerprint) -> Fingerprint:
    """Score the reference's probes at the reference's ids."""
    logprobs, top1, steps = [], [], []
    start = 0
    for probe in reference.probes:
        logits = model(torch.tensor([probe])).logits[0, :-1].float()
        ids = torch.from_numpy(reference.ids[start : start + len(probe) - 1].astype(np.int64))
        if int(ids.max()) >= logits.shape[-1]:
            raise DriftError(
                f"the model knows {logits.shape[-1]} tokens, the reference scores "
                f"token {int(ids.max())}: the vocabulary shrank"
            )
        logprobs.append(torch.log_softmax(logits, dim=-1).gather(1, ids).numpy())
        top1.append(logits.argmax(dim=-1).numpy())
        steps.append(largest_steps(logits.numpy()))
        start += len(probe) - 1
    return Fingerprint(
        probes=reference.probes,
        ids=reference.ids,
        logprobs=np.concatenate(logprobs).astype(np.float32),
        top1=np.concatenate(top1).astype(np.int32),
        engine="transformers",
        steps=np.concatenate(steps),
    )


@torch.no_grad()
def reference(model: Any, probes: Sequence[Sequence[int]]) -> Fingerprint:
    """The first fingerprint of a model: it chooses the ids, its own most likely ones.

    For a model that no training engine of ours has measured.
    """
    logits = [model(torch.tensor([list(probe)])).logits[0, :-1].float() for probe in probes]
    logprobs = torch.log_softmax(torch.cat(logits), dim=-1)
    ids = logprobs.topk(min(TOP_K, logprobs.shape[-1]), dim=-1).indices
    return Fingerprint(
        probes=tuple(tuple(probe) for probe in probes),
        ids=ids.to(torch.int32).numpy(),
        logprobs=logprobs.gather(1, ids).numpy(),
        top1=logprobs.argmax(dim=-1).to(torch.int32).numpy(),
        engine="transformers",
        steps=np.concatenate([largest_steps(rows.numpy()) for rows in logits]),
    )


@torch.no_grad()
def token_logprobs(model: Any, prompt: Sequence[int], reply: Sequence[int]) -> list[float]:
    """Log-probability of each token of a reply, nats, by the whole distribution."""
    ids = torch.tensor([[*prompt, *reply]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    found: list[float] = (
        logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
    )
    return found


@torch.no_grad()
def drawn(
    model: Any,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos: Collection[int],
    temperature: float,
    seed: int,
) -> list[int]:
    """One continuation of a prompt by draws; its tokens, the EOS included when it was reached."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    inputs, past = torch.tensor([list(prompt)]), None
    while len(tokens) < max_new_tokens:
        out = model(input_ids=inputs, past_key_values=past, use_cache=True)
        past = out.past_key_values
        chances = (out.logits[0, -1].float() / temperature).softmax(dim=-1)
        inputs = torch.multinomial(chances, 1, generator=generator)[None]
        tokens.append(int(inputs))
        if tokens[-1] in eos:
            break
    return tokens


@torch.no_grad()
def greedy(
    model: Any, prompt: Sequence[int], *, max_new_tokens: int, eos: Collection[int]
) -> tuple[list[int], list[list[tuple[int, float]]]]:
    """Greedy continuation of one prompt.

    Returns:
        The new tokens, the EOS included when it was reached, and for every one of them the
        `ALTERNATIVES` most likely tokens with their logits, which tell a tie from a difference.
    """
    tokens: list[int] = []
    candidates: list[list[tuple[int, float]]] = []
    inputs, past = torch.tensor([list(prompt)]), None
    while len(tokens) < max_new_tokens:
        out = model(input_ids=inputs, past_key_values=past, use_cache=True)
        logits, past = out.logits[0, -1].float(), out.past_key_values
        values, ids = logits.topk(min(ALTERNATIVES, logits.shape[-1]))
        candidates.append(list(zip(ids.tolist(), values.tolist(), strict=True)))
        token = int(logits.argmax())
        tokens.append(token)
        if token in eos:
            break
        inputs = torch.tensor([[token]])
    return tokens, candidates
