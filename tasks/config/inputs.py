"""Sections `model` and `data`: what a run begins with."""

from __future__ import annotations

from dataclasses import dataclass, field

from tasks.config.choices import Attention, DataKind, Dtype, ModelKind, OnBadLine, Stopping
from tasks.config.defaults import COMPUTED


@dataclass
class Model:
    """The base model."""

    kind: ModelKind = COMPUTED  # hf where there is a path, else toy
    path: str | None = None  # folder or Hugging Face id; kind hf
    revision: str | None = None  # branch, tag or commit of a Hugging Face id
    dtype: Dtype = Dtype.bfloat16
    attn_implementation: Attention = Attention.sdpa  # flash_attention_2 needs flash-attn
    trust_remote_code: bool = False  # runs Python that the model's author wrote
    new_tokens: list[str] = field(default_factory=list)  # texts that become tokens, and are trained
    vocab_multiple: int = 1  # rows of a vocabulary that grew are a multiple of this
    steps: int = 400  # pre-training steps; kind toy
    seed: int = 0  # corpus, weights and order; kind toy


@dataclass
class DataSource:
    """One of several sources; what is null is as in section `data`."""

    path: str = "???"  # to be given: file, or `datasets` id for kind hub
    kind: DataKind | None = None
    split: str | None = None  # kind hub
    probability: float | None = None  # of a row to come from here; all sources or none
    max_samples: int | None = None  # rows read in one pass at most
    messages_key: str | None = None
    prompt_key: str | None = None
    response_key: str | None = None
    system_key: str | None = None
    text_key: str | None = None
    chosen_key: str | None = None
    rejected_key: str | None = None
    label_key: str | None = None
    margin_key: str | None = None
    answer_key: str | None = None


@dataclass
class Data:
    """What to learn from and to be tested on. The objective says which columns are read."""

    kind: DataKind = COMPUTED  # by the suffix of path; hub where there is a name; else toy
    path: str | None = None  # file; kinds jsonl, csv, parquet
    eval_path: str | None = None  # file of held-out rows; null: eval_fraction
    name: str | None = None  # `datasets` id; kind hub
    split: str = "train"  # kind hub
    eval_split: str | None = None  # kind hub; null: eval_fraction
    eval_fraction: float = 0.05  # share of the rows that is held out
    messages_key: str | None = COMPUTED  # column with a list of messages; csv: none
    prompt_key: str = "prompt"  # these two where there is no column of messages
    response_key: str = "response"  # column with the response, beside prompt_key
    system_key: str | None = None  # column with a system message
    text_key: str | None = None  # column with raw text, instead of all these: as in pre-training
    chosen_key: str = "chosen"  # pairs: answer or whole conversation
    rejected_key: str = "rejected"  # pairs: answer or whole conversation
    margin_key: str | None = None  # pairs: column with a number, for the reward objective
    label_key: str = "label"  # kto: column with true or false
    answer_key: str | None = (
        "answer"  # prompts: column with the reference answer, where it is there
    )
    sources: list[DataSource] = field(default_factory=list)  # instead of path
    stopping: Stopping = Stopping.all_exhausted  # of sources with probabilities
    max_samples: int | None = None  # rows read at most; null: all
    on_bad_line: OnBadLine = OnBadLine.fail
    max_truncated: float = 0.2  # share of training rows that train.max_len may cut; more: an error
    chat_template: str | None = None  # Jinja file; null: the tokenizer's own
    seed: int = 0  # which rows are held out; kind toy: which rows there are
    train_size: int = 2240  # rows; kind toy: 70 steps of 32
    heldout_size: int = 300  # rows; kind toy
