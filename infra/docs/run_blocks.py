"""Run the commands and programs that README.md and docs/quickstart.md show.

python -m infra.docs.run_blocks

Trainings are planned, deliveries made without an engine, on a tiny model. Ends with 1 on failure.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

PROJECT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/quickstart.md")
SKIPPED = (  # commands that need a network, a server or minutes
    "make ",  # installs, or trains for minutes
    "pip install ",
    "plumbline_witness ",  # needs another trainer
    "flows/serve.py",  # starts vLLM
    "verify",  # needs a server
)


def commands(page: str) -> list[str]:
    """Return the lines of the shell blocks of a page, and its Python blocks as commands."""
    lines: list[str] = []
    text = (PROJECT / page).read_text()
    for language, block in re.findall(r"^```(sh|bash|python)\n(.*?)^```", text, re.M | re.S):
        if language == "python":
            lines.append(f".venv/bin/python -c {shlex.quote(block)}")
        else:
            lines += block.replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


def make_inputs(folder: Path) -> None:
    """Write the model, the adapter and the rows that the pages name."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from tasks.toy.pretrain import pretrain

    pretrain(base := folder / "models/qwen", steps=1, seed=0)
    (folder / "models/qwen3-8b").symlink_to(base)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    adapted.save_pretrained(folder / "ckpt/adapter")
    questions = ({"role": "user", "content": f"question {number}"} for number in range(40))
    answer = {"role": "assistant", "content": "b"}
    rows = (json.dumps({"messages": [question, answer]}) for question in questions)
    (folder / "chats.jsonl").write_text("\n".join(rows) + "\n")


def typed(command: str, folder: Path) -> str:
    """Return a command with paths below `folder`, which neither trains nor starts an engine."""
    command = re.sub(r"=/(ckpt|models|served)/", rf"={folder}/\1/", command)
    command = command.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
    command = command.replace(" flows/", f" {PROJECT}/flows/")
    if "flows/rlhf.py" in command and "plan=true" not in command:
        command += " plan=true"
    return f"{command} smoke.engine=none" if "flows/deliver.py" in command else command


def main() -> int:
    failed = 0
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        shown = [typed(line, folder) for page in PAGES for line in commands(page)]
        for command in dict.fromkeys(shown):
            if any(word in command for word in SKIPPED):
                continue
            shutil.rmtree(folder / "served", ignore_errors=True)  # pages deliver to it twice
            env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(PROJECT)}
            done = subprocess.run(
                ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True
            )
            if done.returncode:
                failed += 1
                print(f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
