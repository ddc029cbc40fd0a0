"""Mistakes of new users: each is answered in at most three lines with an override, status 2.

In this process, by the functions that the programs call; a few again as real processes. How long
each takes as a process: `python -m tests.config.test_mistakes`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

from flows.chain.steps import chain_steps
from flows.cli.config import Composed
from flows.cli.entry import run_main
from flows.cli.plan import check
from flows.commands import audit as audit_command
from flows.delivery.run_delivery import plan
from tests.audit.making import make_adapter, make_model
from tests.conftest import PROJECT

SIDES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
FILES = {
    "chats.jsonl": json.dumps({"messages": SIDES}) + "\n",
    "empty.jsonl": "",
    "broken.jsonl": json.dumps({"messages": SIDES}) + '\n{"messages": [\n',
    "list.jsonl": json.dumps([{"messages": SIDES}] * 2),
    "alpaca.jsonl": json.dumps({"instruction": "q", "output": "a"}) + "\n",
    "tools.jsonl": json.dumps({"conversations": [{"from": "human", "value": "q"},
                                                 {"from": "observation", "value": "{}"}]}) + "\n",
    "table.csv": "question,answer\nq,a\n",
}  # fmt: skip
RUN = "+exp=sft_qlora"


class Mistake(NamedTuple):
    """A command (arguments separated by `;`) and the part of its answer that suggests a fix."""

    program: str
    typed: str
    answer: str


MISTAKES = [
    # names of settings
    Mistake("rlhf", f"{RUN};learning_rate=1e-4", "-> train.lr=1e-4"),
    Mistake("rlhf", f"{RUN};train.learning_rate=1e-4", "-> train.lr=1e-4"),
    Mistake("rlhf", f"{RUN};train.lrr=1e-4", "-> train.lr=1e-4"),
    Mistake("rlhf", f"{RUN};per_device_train_batch_size=4", "-> train.micro_batch_size=4"),
    Mistake("rlhf", f"{RUN};gradient_accumulation_steps=4", "-> train.global_batch_size=<"),
    Mistake("rlhf", f"{RUN};bf16=true", "-> model.dtype=bfloat16"),
    Mistake("rlhf", f"{RUN};lora_alpha=16;lora_r=8", "lora_r=8) -> peft.rank=8"),
    Mistake("rlhf", f"{RUN};cutoff_len=2048", "-> train.max_len=2048"),
    Mistake("rlhf", f"{RUN};output_dir=out", "-> paths.runs=out"),
    Mistake("rlhf", f"{RUN};dataset=chats.jsonl", "-> data.path=chats.jsonl"),
    Mistake("rlhf", "+exp=grpo;rl.prompts=8", "-> rl.rollout_batch_size=8"),
    Mistake("rlhf", "+exp=grpo;rl.samples=8;lr=1", "rl.samples=8) -> rl.num_generations=8"),
    Mistake("rlhf", "+exp=qlora;ppo:rl.passes=2", "-> ppo:rl.ppo_epochs=2"),
    Mistake("rlhf", "+exp=ppo_full;rl.lam=0.9", "-> rl.gae_lambda=0.9"),
    Mistake("rlhf", "+exp=ppo_full;ppo_epochs=2", "-> rl.ppo_epochs=2"),
    Mistake("rlhf", "+exp=grpo;num_generations=8", "-> rl.num_generations=8"),
    Mistake("rlhf", f"{RUN};gamma=0.9", "-> train.loss.gamma=0.9 or rl.gamma=0.9"),
    Mistake("rlhf", f"{RUN};trian.lr=1", "-> train.lr=1"),
    Mistake("rlhf", "+exp=qlora;ppo.rl.iterations=3", "-> ppo:rl.iterations=3"),
    Mistake("rlhf", "+exp=qlora;poo:train.lr=1", "-> ppo:train.lr=1"),
    # groups and experiments
    Mistake("rlhf", "+exp=sft", "-> +exp=sft_full or "),
    Mistake("rlhf", "exp=sft_qlora", "-> +exp=sft_qlora"),
    Mistake("rlhf", "sft_qlora", "-> +exp=sft_qlora"),
    Mistake("rlhf", f"{RUN};peft=adalora", "-> peft=lora or peft=qlora"),
    Mistake("rlhf", f"{RUN};+train=dpo", "-> train=dpo"),
    Mistake("rlhf", f"{RUN};zero=3", "-> zero=zero3"),
    # values
    Mistake("rlhf", "+exp=sft_full;train.lr=abc", "-> train.lr=0.0003"),
    Mistake("rlhf", f"{RUN};train.epochs=two", "-> train.epochs=1.0"),
    Mistake("rlhf", f"{RUN};smoke.engine=sglang", "is one of vllm, server, transformers"),
    Mistake("rlhf", f"{RUN};train.nproc=-1", "-> train.nproc="),
    Mistake("deliver", "source=a;out=b;convert.quantize=gguf:q4_0", "-> convert.quantize=gguf:q"),
    Mistake("rlhf", f"{RUN};train.epochs=1,2", "--multirun train.epochs=1,2"),
    Mistake("rlhf", f"{RUN};train.loss=dpo", "-> train.loss.<key>=<value>"),
    # grammar
    Mistake("rlhf", f"{RUN};train.lr;1e-4", "-> train.lr=1e-4"),
    Mistake("rlhf", f"{RUN};plan:true", "-> plan=true"),
    Mistake("rlhf", "+exp=qlora;plan:true", "-> plan=true"),
    Mistake("rlhf", f"{RUN};train.lr;=;1e-4", "-> train.lr=1e-4"),
    Mistake("rlhf", "+exp=dpo;data.sources=[{path:;a.json}]", "-> data.sources='[{path: a.json}]'"),
    Mistake("rlhf", f"{RUN};--lr;1e-4", "-> train.lr=1e-4"),
    Mistake("rlhf", "--model_name_or_path;x;--bf16", "dashes -> model.path=x"),
    Mistake("rlhf", "--config;sft.yaml", "--help"),
    Mistake("rlhf", f"{RUN};--cfg;jobs", "--cfg job"),
    # data
    Mistake("rlhf", f"{RUN};data=jsonl", "-> data.path=<file>"),
    Mistake("rlhf", f"{RUN};data=jsonl;data.path=chat.jsonl", "-> data.path="),
    Mistake("rlhf", f"{RUN};data=jsonl;data.path=empty.jsonl", "has no rows"),
    Mistake("rlhf", f"{RUN};data=jsonl;data.path=broken.jsonl", "broken.jsonl:2: invalid JSON"),
    Mistake("rlhf", f"{RUN};data=jsonl;data.path=list.jsonl", "-> data.path=list.json"),
    Mistake("rlhf", f"{RUN};data=jsonl;data.path=alpaca.jsonl", "-> data.prompt_key=instruction"),
    Mistake("rlhf", f"{RUN};data=jsonl;data.path=tools.jsonl", "turns of tools are not trained"),
    Mistake("rlhf", f"{RUN};data=jsonl;data.path=table.csv", "data=jsonl|csv|parquet"),
    Mistake("rlhf", "+exp=dpo;data=jsonl;data.path=chats.jsonl", "without 'chosen' and 'rejected'"),
    Mistake("rlhf", "chats.jsonl", "-> data.path=chats.jsonl"),
    # model and machine
    Mistake("rlhf", f"{RUN};model=hf", "-> model.path=<folder or hub id>"),
    Mistake("rlhf", f"{RUN};model=hf;model.path=/no/such", "-> model.path=<folder or hub id>"),
    Mistake("rlhf", f"{RUN};zero=zero3", "-> zero=zero2 or peft=lora"),
    Mistake("rlhf", f"{RUN};model.attn_implementation=flash_attention_2",
            "-> model.attn_implementation=sdpa"),
    Mistake("rlhf", f"{RUN};force=[tran]", "-> force=[train]"),
    Mistake("rlhf", f"{RUN};tracking.prometheus=m.txt", "-> tracking.prometheus=m.txt.prom"),
    Mistake("rlhf", f"{RUN};tracking.prometheus=no/m.prom", "-> tracking.prometheus=null"),
    # deliver and audit
    Mistake("deliver", "adapter;out=new", "-> base=<"),
    Mistake("deliver", "adapter;base=model", "out=<a new folder>"),
    Mistake("deliver", "adaptor;base=model;out=new", "no such folder"),
    Mistake("deliver", "chats.jsonl;base=model;out=new", "-> source=<folder>"),
    Mistake("deliver", "adapter;base=model;out=taken", "-> out=<another folder>"),
    Mistake("deliver", "--adapter_name_or_path;adapter;--export_dir;new", "-> source=adapter"),
    Mistake("deliver", "adapter;model;out=new", "-> source=adapter base=<folder>"),
    Mistake("audit", "no_such_folder", "no such folder"),
    Mistake("audit", "adapter;values", "-> values=true"),
    Mistake("audit", "adapter;fix=true", "-> out_dir=<a new folder>"),
    Mistake("audit", "--model;adapter", "-> source=adapter"),
    Mistake("audit", "adapter;values:true", "-> values=true"),
    Mistake("deliver", "adapter;base=model;out=new;convert:dtype=float16", "convert.dtype=float16"),
    Mistake("prune", "keep=1;older_than:30", "-> older_than=30"),
    Mistake("audit", "base=model", "source=<folder of the checkpoint>"),
]  # fmt: skip

JOBS: dict[str, Callable[[Composed, list[str]], int]] = {
    "rlhf": lambda composed, overrides: check(chain_steps(composed, overrides)) or 0,
    "deliver": lambda composed, _: plan(composed) and 0,
    "audit": audit_command._job,
    "prune": lambda _composed, _overrides: 0,
}


def make(folder: Path) -> None:
    """Write the files that the mistakes use."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    make_adapter(folder / "adapter")
    make_model(folder / "model")
    (folder / "taken").mkdir()
    (folder / "taken" / "mine.txt").write_text("of the user")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    make(folder)
    return folder


def test_there_are_forty() -> None:
    assert len({mistake.typed for mistake in MISTAKES}) >= 40


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


def process(mistake: Mistake, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = PROJECT / "flows" / f"{mistake.program}.py"
    command = [sys.executable, str(program), *mistake.typed.split(";")]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "typed",
    [
        f"{RUN};learning_rate=1e-4",
        "+exp=sft",
        "--lr;1e-4",
        f"{RUN};zero=zero3",
        "adapter;out=new",
        "no_such_folder",
    ],
)
def test_mistakes_in_a_process_of_their_own(typed: str, place: Path) -> None:
    (mistake,) = [m for m in MISTAKES if m.typed in (typed, f"{RUN};{typed}")]
    done = process(mistake, place)
    assert done.returncode == 2, done.stderr
    assert mistake.answer in done.stderr
    assert len(done.stderr.splitlines()) <= 3
    assert done.stdout == ""


if __name__ == "__main__":
    with TemporaryDirectory() as made:
        make(Path(made))
        for each in MISTAKES:
            began, before = time.monotonic(), os.times()
            status, after = process(each, Path(made)).returncode, os.times()
            cpu = sum(after[2:4]) - sum(before[2:4])  # what a quiet machine would take
            wall = time.monotonic() - began
            print(f"{wall:5.2f} s, {cpu:4.2f} s of CPU; {status}  {each.program} {each.typed}")
