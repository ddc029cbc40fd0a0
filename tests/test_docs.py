"""README and docs are true: commands are executed or composed, files and options exist."""

from __future__ import annotations

import json
import logging
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from flows.chain.steps import chain_steps
from flows.cli.arguments import apart
from flows.cli.config import compose_config
from tasks.rl.rewards.function import Function
from tasks.rl.rewards.reference import FunctionReference
from tests.commands import command
from tests.conftest import PROJECT
from tests.rl.making import response
from tests.tiny import tiny
from tests.weights.making import ROWS, Spread, save_tokenizer, trained_model

DOCS = PROJECT / "docs"
PAGES = ("README.md", *sorted(p.relative_to(PROJECT).as_posix() for p in DOCS.rglob("*.md")))
GUIDES = [p for p in PAGES if not p.startswith(("docs/decisions/", "docs/log.md"))]
TEXT = "\n".join((PROJECT / page).read_text() for page in GUIDES)
ELSEWHERE = (
    "recipes/",
    "node_exporter",
    "register.sign",
    "verify=",
    "push=",
    "lm_eval",
    "gguf:",
    "--config-dir",
    "KEY",
    "global_step",
)
"""In commands that need what a test of their own provides, or hardware; they are composed here."""


TRAINERS = {
    "trl/checkpoint-60": ("", ""),
    "llamafactory": ("training_args.yaml", "stage: sft\nfinetuning_type: lora\n"),
    "ms-swift/checkpoint-60": ("args.json", '{"tuner_type": "lora", "quant_bits": null}'),
    "axolotl": ("axolotl.yaml", "adapter: qlora\nload_in_4bit: true\nload_in_8bit: false\n"),
    "unsloth": ("", ""),
    "openrlhf": ("", ""),
    "verl/actor/lora_adapter": ("", ""),
}
"""Folders of adapters by trainer, and the file that says how the base was held."""


def commands() -> list[str]:
    """Return the commands of all pages, without repetitions."""
    fenced = re.findall(r"^```sh\n(.*?)^```", TEXT, flags=re.M | re.S)
    lines = "\n".join(fenced).replace("\\\n", " ").splitlines()
    typed = [line.split("  #")[0].strip() for line in lines]
    programs = ("make ", "python ", ".venv/bin/")
    return list(dict.fromkeys(line for line in typed if line.startswith(programs)))


def words_of(program: str) -> list[list[str]]:
    """Return the arguments of each documented command of a program in `flows/`."""
    marker = f"flows/{program}.py"
    return [shlex.split(line.split(marker, 1)[1]) for line in commands() if marker in line]


def executed(program: str) -> list[list[str]]:
    return [
        words for words in words_of(program) if not any(e in " ".join(words) for e in ELSEWHERE)
    ]


def test_most_commands_are_executed() -> None:
    """Trainings up to their plan. The others: `make` in tests/infra, `verify` in tests/verify."""
    programs = ("rlhf", "deliver", "audit", "status", "prune")
    assert sum(len(executed(program)) for program in programs) >= 44


def test_the_chinese_readme_is_in_step() -> None:
    """It has the same commands and output, the same figures in tables, and live links."""
    english, chinese = ((PROJECT / f"README{name}.md").read_text() for name in ("", ".zh-CN"))
    blocks = re.compile(r"^```.*?^```", re.M | re.S)
    assert blocks.findall(chinese) == blocks.findall(english)
    figures = re.compile(r"\d[\d.,]* (?:s|MB|tokens/s|B|M)\b")
    assert figures.findall(chinese) == figures.findall(english)
    assert len(re.findall(r"^## ", chinese, re.M)) == len(re.findall(r"^## ", english, re.M))
    links = re.findall(r"\]\(([\w./-]+)\)", chinese)
    assert [link for link in links if not (PROJECT / link).exists()] == []


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), flags=re.M))
    named = {line.split()[1] for line in commands() if line.startswith("make ")}
    assert named
    assert named <= targets


@pytest.mark.parametrize("words", words_of("rlhf"), ids=" ".join)
def test_every_training_composes(words: list[str]) -> None:
    if "--config-dir" in words:
        pytest.skip("tests/config/test_entry.py composes it")
    given = [word for word in words if not word.startswith("-") and word != "job"]
    overrides, _ = apart(given)
    for one in OverridesParser.create().parse_overrides(overrides):
        assert one.get_key_element()
    for choice in sweeps(overrides):  # one configuration for each value of a sweep
        chain_steps(compose_config(choice), [*choice, *apart(given)[1]])


@pytest.mark.parametrize("program", ["deliver", "audit", "verify", "status", "prune"])
def test_every_other_command_composes(program: str) -> None:
    documented = words_of(program)
    assert documented
    for words in documented:
        compose_config(words, config_name=program)


def sweeps(overrides: list[str]) -> list[list[str]]:
    if not any("," in o and not o.split("=", 1)[1].startswith("[") for o in overrides):
        return [overrides]
    (swept,) = [o for o in overrides if "," in o]
    rest = [o for o in overrides if o != swept]
    key, values = swept.split("=", 1)
    return [[*rest, f"{key}={value}"] for value in values.split(",")]


PROGRAMS = [
    ("guides/own.md", "rewards.py"), ("guides/own.md", "game.py"), ("training.md", "judge.py")
]  # fmt: skip


def documented(page: str, name: str) -> str:
    """Return the text of a program that a page shows; its first line is its name."""
    text = (PROJECT / "docs" / page).read_text()
    (source,) = re.findall(rf"^```python\n# {name}\n(.*?)^```", text, flags=re.M | re.S)
    return str(source)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the pages call /models, /ckpt, chats.jsonl and so on."""
    root = tmp_path_factory.mktemp("documented")
    base = root / "base"
    sizes = {"vocab_size": ROWS, "hidden_size": 64, "intermediate_size": 128}
    config = tiny("Qwen2", **sizes, num_attention_heads=2, max_position_embeddings=4096)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(base)
    save_tokenizer(base)
    (root / "models").mkdir()
    for name in ("qwen", "qwen2.5-7b", "llama-3.1-8b"):
        (root / "models" / name).symlink_to(base)
    (root / "ckpt").mkdir()
    trained_model(base, Spread(), seed=1).save_pretrained(root / "ckpt/adapter")
    for trainer, (file, text) in TRAINERS.items():
        shutil.copytree(root / "ckpt/adapter", root / "ckpt" / trainer)
        if file:
            (root / "ckpt" / trainer / file).write_text(text)
    unsloth = root / "ckpt/unsloth/adapter_config.json"
    named = {"base_model_name_or_path": "unsloth/Qwen3-8B-bnb-4bit"}
    unsloth.write_text(json.dumps(json.loads(unsloth.read_text()) | named))
    shutil.copytree(base, root / "ckpt/full")
    shutil.copytree(base, root / "ckpt/ppo")
    save_file(
        {"v_head.summary.weight": torch.ones(1, 64)}, root / "ckpt/ppo/value_head.safetensors"
    )
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    worse = [turns[0], {"role": "assistant", "content": "3"}]
    for name, row in {
        "chats": {"messages": turns},
        "pairs": {"chosen": turns, "rejected": worse},
        "books": {"text": "one and one is two"},
        "labelled": {"messages": turns, "label": True},
        "prompts": {"prompt": "1+1", "answer": "2"},
    }.items():
        (root / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 40)
    (root / "rows.csv").write_text("question,answer\n" + "1+1,2\n" * 40)
    for page, name in PROGRAMS:
        (root / name).write_text(documented(page, name))
    return root


@pytest.mark.parametrize(
    ("page", "file", "name", "rewards"),
    [
        ("guides/own.md", "rewards.py", "score", [1.0, 1.0, 0.0, 0.0]),
        ("training.md", "judge.py", "valid_json", [0.0, 0.0, 0.0, 1.0]),
    ],
)
def test_a_documented_reward_function_scores_responses(
    page: str, file: str, name: str, rewards: list[float], tmp_path: Path
) -> None:
    (tmp_path / file).write_text(documented(page, file))
    reference = FunctionReference.of(f"{tmp_path / file}:{name}")
    log = logging.getLogger("tests")
    given = [response("copy ape", text, answer="ape") for text in ("ape", " ape", "apes", "3")]
    function = Function(reference, timeout_s=60.0, log=log, log_path=tmp_path / "log")
    try:
        assert function(given) == rewards
    finally:
        function.close()


@pytest.fixture
def typed(
    places: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:
    """Run a documented command in this process, with its paths below `places`."""
    monkeypatch.chdir(places)

    def run(program: str, *words: str) -> tuple[int, str]:
        local = [re.sub(r"(?<==)/(?=(models|ckpt|served)/)", f"{places}/", word) for word in words]
        argv = command(program, *local, f"paths.runs={tmp_path / 'runs'}")
        monkeypatch.setattr(sys, "argv", argv[1:])
        code = import_module(f"flows.commands.{program}").main()
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def test_every_training_is_planned(typed: Callable[..., tuple[int, str]]) -> None:
    """Each gets as far as it can without training; one is documented to be refused."""
    wrong = []
    for words in executed("rlhf"):
        plan = [] if {"--help", "--cfg", "plan=true"} & {*words} else ["plan=true"]
        code, output = typed("rlhf", *words, *plan)
        refused = "zero=zero3" in words and "+exp=sft_qlora" in words
        if code != (2 if refused else 0) or "train" not in output:
            wrong.append((words, code, output[-600:]))
    assert not wrong


def test_every_audit_and_delivery_runs(typed: Callable[..., tuple[int, str]], places: Path) -> None:
    """In the order of the pages; a checkpoint that one command repairs is the next one's source."""
    for line in [line for line in commands() if re.search(r"flows/(audit|deliver)\.py", line)]:
        program = "audit" if "flows/audit.py" in line else "deliver"
        words = shlex.split(line.split(f"flows/{program}.py", 1)[1])
        if any(elsewhere in line for elsewhere in ELSEWHERE):
            continue
        engine = ["smoke.engine=none"] if program == "deliver" and "compare" not in line else []
        code, output = typed(program, *words, *engine)
        refused = "source=/ckpt/adapter" in words and not any("merge.base" in w for w in words)
        if program == "deliver" and refused:
            assert (code, "merge.base=original for LoRA" in output) == (2, True), output
        else:
            assert code == (1 if words == ["source=/ckpt/ppo"] else 0), (words, output)
        shutil.rmtree(places / "served", ignore_errors=True)
    assert not (places / "ckpt/ppo-new/value_head.safetensors").exists()


@pytest.mark.parametrize("program", ["status", "prune"])
def test_every_look_at_runs_works(
    program: str, typed: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    (tmp_path / "runs/artifacts").mkdir(parents=True)
    for words in executed(program):
        code, output = typed(program, *words)
        assert code == 0, (words, output)


@pytest.mark.parametrize("page", PAGES)
def test_every_path_it_names_exists(page: str) -> None:
    text = (PROJECT / page).read_text()
    if page in GUIDES:  # what decisions and the log name may be gone by now
        folders = "flows|tasks|conf|infra|docs|tests|requirements"
        named = {PROJECT / name for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", text)}
        assert [path for path in named if not path.exists()] == []


def test_the_site_builds_and_has_every_setting(tmp_path: Path) -> None:
    """Broken links and anchors, and pages that the menu lacks, are errors of a strict build."""
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    done = subprocess.run(
        [*argv, "-f", str(PROJECT / "infra/docs/mkdocs.yml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    settings = (tmp_path / "reference/settings.html").read_text()
    keys = set(re.findall(r"<code>([a-z_0-9.]+)</code>", settings))
    assert {"train.lr", "merge.base", "convert.llama_cpp", "watch"} <= keys
    assert "peft.rank" in (tmp_path / "reference/peer-names.html").read_text()
    links = re.findall(r'href="([^"]*training.html)"', (tmp_path / "index.html").read_text())
    assert links
    assert not any(link.startswith("docs/") for link in links)
