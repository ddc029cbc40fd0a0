"""Sections `model` and `data`: the base model and the data of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from tasks.config.choices import (
    Attention,
    ControlTokens,
    Count,
    DataKind,
    Dtype,
    ModelKind,
    Natural,
    OnBadLine,
    PositiveShare,
    Share,
    Stopping,
    ToyTasks,
)
from tasks.config.defaults import COMPUTED
from tasks.config.section import Section


@dataclass(frozen=True)
class Origin(Section):
    """Place of the base model."""

    kind: ModelKind = COMPUTED  # hf if there is a path, else toy
    path: str | None = None  # folder or Hugging Face id; kind hf
    revision: str | None = None  # branch, tag or commit of a Hugging Face id


@dataclass(frozen=True)
class Loading(Section):
    """Settings of the model that the ranks load."""

    dtype: Dtype = "bfloat16"  # what the ranks compute in
    attn_implementation: Attention = "sdpa"  # flash_attention_2 needs flash-attn
    trust_remote_code: bool = False  # runs Python that the model's author wrote
    new_tokens: tuple[str, ...] = ()  # texts that become tokens, and are trained


# Fields of a dataclass come in the order of its bases from last to first.
@dataclass(frozen=True)
class Model(Loading, Origin):
    """The base model."""

    dtype: Dtype = COMPUTED  # what training and vLLM compute in; default: what this machine does
    steps: Natural = 400  # pre-training steps; kind toy
    seed: int = 0  # corpus, weights and order; kind toy


@dataclass(frozen=True)
class DataSource(Section):
    """One of several sources; null: as in section `data`."""

    path: str  # file, or `datasets` id for kind hub
    kind: DataKind | None = None
    split: str | None = None  # kind hub
    probability: float | None = None  # of a row to come from here; for all sources or for none
    max_samples: Count | None = None  # rows read in one pass, at most
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


@dataclass(frozen=True)
class Data(Section):
    """Rows to learn from and to evaluate on. The objective decides which columns are read."""

    kind: DataKind = COMPUTED  # by the suffix of path; hub if there is a name; else toy
    path: str | None = None  # file; kinds jsonl, csv, parquet
    eval_path: str | None = None  # file of held-out rows; null: eval_fraction
    name: str | None = None  # `datasets` id; kind hub
    split: str = "train"  # kind hub
    eval_split: str | None = None  # kind hub; null: eval_fraction
    eval_fraction: PositiveShare = 0.05  # share of the rows that is held out
    messages_key: str | None = COMPUTED  # column with a list of messages; csv: none
    prompt_key: str = "prompt"  # column with the prompt, if there is no column of messages
    response_key: str = "response"  # column with the response, beside prompt_key
    system_key: str | None = None  # column with a system message
    text_key: str | None = None  # column with raw text, instead of all these: as in pre-training
    chosen_key: str = "chosen"  # pairs: response or whole conversation
    rejected_key: str = "rejected"  # pairs: response or whole conversation
    margin_key: str | None = None  # pairs: column with a number, for the reward objective
    label_key: str = "label"  # kto: column with true or false
    answer_key: str | None = "answer"  # prompts: column with the reference answer, if it exists
    sources: list[DataSource] = field(default_factory=list)  # several sources, instead of path
    stopping: Stopping = "all_exhausted"  # when mixing ends; sources with probabilities
    max_samples: Count | None = None  # rows read, at most; null: all
    on_bad_line: OnBadLine = "fail"  # what happens to a row that cannot be used
    control_tokens: ControlTokens | None = None  # in texts; null: refuse in answers, else warn
    max_truncated: Share = 0.2  # share of training rows that train.max_len may cut; more: an error
    chat_template: str | None = None  # Jinja file; null: the tokenizer's own
    seed: int = 0  # selects the held-out rows; kind toy: all rows
    tasks: ToyTasks = "letters"  # kind toy; calculator: sums, for rl.environment=calculator
    train_size: Count = 2240  # rows; kind toy: 70 steps of 32
    heldout_size: Count = 300  # rows; kind toy
