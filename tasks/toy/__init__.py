"""The embedded default: short tasks with known answers, and a small base model that needs training.

splits      the tasks: prompts with right and wrong answers; pre-training corpus, `dataset` artifact
calculator  a task that needs a tool
pretrain    pre-train a Qwen2 model of about 1M parameters and its tokenizer, in a child process

Training shows an effect within seconds on two CPU cores: the last part of the corpus has flawed
answers, so clean data improves the base model.
"""

from __future__ import annotations

from typing import Any

VOCABULARY = 512
CONTEXT = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}
"""Arguments of `Qwen2Config`, about 918,000 parameters."""
