"""Mistakes of new users: each is answered in at most three lines with an override, status 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from flows.chain.steps import chain_steps
from flows.cli.config import Composed
from flows.cli.entry import run_main
from flows.cli.plan import check
from flows.commands import audit as audit_command
from flows.delivery.run_delivery import plan
from tests.audit.making import make_adapter, make_model

SIDES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
FILES = {
    "chats.jsonl": json.dumps({"messages": SIDES}) + "\n",
    "broken.jsonl": json.dumps({"messages": SIDES}) + '\n{"messages": [\n',
    "alpaca.jsonl": json.dumps({"instruction": "q", "output": "a"}) + "\n",
}  # fmt: skip
RUN = "+exp=sft_qlora"


class Mistake(NamedTuple):
    """A command (arguments separated by `;`) and the part of its answer that suggests a fix."""

    program: str
    typed: str
    answer: str


MISTAKES = [
    Mistake("rlhf", f"{RUN};learning_rate=1e-4", "-> train.lr=1e-4"),
    Mistake("rlhf", f"{RUN};gradient_accumulation_steps=4", "-> train.global_batch_size=<"),
    Mistake("rlhf", "+exp=grpo;rl.samples=8;lr=1", "rl.samples=8) -> rl.num_generations=8"),
    Mistake("rlhf", "+exp=qlora;poo:train.lr=1", "-> ppo:train.lr=1"),
    Mistake("rlhf", "+exp=sft", "-> +exp=sft_full or "),
    Mistake("rlhf", "sft_qlora", "-> +exp=sft_qlora"),
    Mistake("rlhf", f"{RUN};+train=dpo", "-> train=dpo"),
    Mistake("rlhf", f"{RUN};zero=3", "-> zero=zero3"),
    Mistake("rlhf", f"{RUN};train.nproc=-1", "-> train.nproc="),
    Mistake("rlhf", f"{RUN};train.epochs=1,2", "--multirun train.epochs=1,2"),
    Mistake("rlhf", f"{RUN};train.lr;1e-4", "-> train.lr=1e-4"),
    Mistake("rlhf", f"{RUN};plan:true", "-> plan=true"),
    Mistake("rlhf", "+exp=dpo;data.sources=[{path:;a.json}]", "-> data.sources='[{path: a.json}]'"),
    Mistake("rlhf", "--model_name_or_path;x;--bf16", "dashes -> model.path=x"),
    Mistake("rlhf", f"{RUN};data=jsonl;data.path=broken.jsonl", "broken.jsonl:2: "),
    Mistake("rlhf", f"{RUN};data=jsonl;data.path=alpaca.jsonl", "-> data.prompt_key=instruction"),
    Mistake("rlhf", "chats.jsonl", "-> data.path=chats.jsonl"),
    Mistake("rlhf", f"{RUN};zero=zero3", "-> zero=zero2 or peft=lora"),
    Mistake("rlhf", f"{RUN};tracking.prometheus=no/m.prom", "-> tracking.prometheus=null"),
    Mistake("deliver", "adapter;out=new", "-> base=<"),
    Mistake("deliver", "adapter;base=model;out=taken", "-> out=<another folder>"),
    Mistake("deliver", "adapter;model;out=new", "-> source=adapter base=<folder>"),
    Mistake("audit", "no_such_folder", "no such folder"),
    Mistake("audit", "adapter;fix=true", "-> out_dir=<a new folder>"),
    Mistake("deliver", "adapter;base=model;out=new;convert:dtype=float16", "convert.dtype=float16"),
    Mistake("prune", "keep=1;older_than:30", "-> older_than=30"),
]  # fmt: skip
JOBS: dict[str, Callable[[Composed, list[str]], int]] = {
    "rlhf": lambda composed, overrides: check(chain_steps(composed, overrides)) or 0,
    "deliver": lambda composed, _: plan(composed) and 0,
    "audit": audit_command._job,
    "prune": lambda _composed, _overrides: 0,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the mistakes use."""
    folder = tmp_path_factory.mktemp("user")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    make_adapter(folder / "adapter")
    make_model(folder / "model")
    (folder / "taken").mkdir()
    (folder / "taken" / "mine.txt").write_text("of the user")
    return folder


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m.program} {m.typed}")
def test_a_mistake_is_answered_in_three_lines(
    mistake: Mistake,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    assert run_main(mistake.program, JOBS[mistake.program], argv=mistake.typed.split(";")) == 2
    told = capsys.readouterr()
    assert mistake.answer in told.err, told.err
    assert len(told.err.splitlines()) <= 3, told.err
    assert told.out == ""
    assert sorted(place.rglob("*")) == before
