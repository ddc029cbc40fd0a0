"""Malicious files that would take a check for ever, or all memory: the audit stays quick."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.audit.making import (
    adapter_tensors,
    edit_json,
    make_adapter,
    make_model,
    tensors,
    write_json,
)

PROJECT = Path(__file__).resolve().parents[2]
SECONDS, MEGABYTES = 20.0, 700
"""Limits for a slow machine; without protection the files take minutes or hours, or tens of GB."""
MEASURED = """
import json, re, resource, sys
from pathlib import Path
from tasks.audit.run import audit
base = Path(sys.argv[2]) if sys.argv[2] else None
codes = sorted({finding.code for finding in audit(Path(sys.argv[1]), base=base).findings})
used = resource.getrusage(resource.RUSAGE_SELF)
# ru_maxrss would include the memory of the test process, which forked this one.
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(json.dumps([codes, used.ru_utime + used.ru_stime, peak // 1024]))
"""
BOMB = "(a|a)*(a|aa)+(.*)*(.*)*$"


def examined(root: Path, base: Path | None = None) -> set[str]:
    """Return the codes of an audit in its own process, which has to stay within the limits."""
    command = [sys.executable, "-c", MEASURED, str(root), str(base or "")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    codes, seconds, megabytes = json.loads(done.stdout)
    assert seconds < SECONDS
    assert megabytes < MEGABYTES
    return set(codes)


def patterns(root: Path) -> None:
    arrays = {key.replace("q_proj", "a" * 60): array for key, array in adapter_tensors().items()}
    settings = {
        "target_modules": BOMB, "exclude_modules": BOMB, "rank_pattern": {BOMB: 2},
        "alpha_pattern": {BOMB: 2}, "layers_pattern": BOMB, "layers_to_transform": [0],
    }  # fmt: skip
    make_adapter(root, arrays, **settings)


def names(root: Path) -> None:
    many = [f"module_{number}" for number in range(100_000)]
    make_adapter(root, modules_to_save=many, target_modules=many, target_parameters=many)


def numbers(root: Path) -> None:
    arrays = tensors()
    arrays["model.layers.0.mlp.experts.999999.up.weight"] = arrays["lm_head.weight"]
    arrays["model.layers.999999.mlp.gate.weight"] = arrays["lm_head.weight"]
    huge = 1 << 60
    make_model(root, arrays, num_experts=huge, num_hidden_layers=huge, vocab_size=huge)


def template(root: Path) -> None:
    make_model(root)
    text = "{% for a in range(99999) %}" * 40 + "{{ a }}" + "{% endfor %}" * 40
    write_json(root / "tokenizer_config.json", {"chat_template": text, "eos_token": "x"})
    (root / "chat_template.jinja").write_text("{{ " + "[" * 100_000)


def endless_string(root: Path) -> None:
    make_model(root)
    (root / "tokenizer.json").write_bytes(b'{"model": {"vocab": {"' + b"\\a" * (24 << 20))


def endless_list(root: Path) -> None:
    make_model(root)
    (root / "tokenizer.json").write_bytes(b'{"model": {"vocab": [' + b'["a",1],' * (6 << 20))


def many_adapter_names(root: Path) -> None:
    array = next(iter(adapter_tensors().values()))
    at = "base_model.model." + "modules_to_save." * 2000
    make_adapter(root, {f"{at}{number}.weight": array for number in range(200)})


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=make.__name__, marks=() if make is patterns else pytest.mark.slow)
        for make in (
            patterns,
            names,
            numbers,
            template,
            endless_string,
            endless_list,
            many_adapter_names,
        )
    ],
)
def test_the_audit_stays_within_its_limits(make: Callable[[Path], None], tmp_path: Path) -> None:
    root, base = tmp_path / "it", make_model(tmp_path / "base")
    make(root)
    assert examined(root, base if make in (patterns, names) else None)


@pytest.mark.slow
def test_plain_settings_are_checked_beside_a_bomb(tmp_path: Path) -> None:
    """Plain settings are checked even if a pattern is not tried."""
    settings: dict[str, Any] = {"rank_pattern": {BOMB: 2}, "lora_alpha": 0}
    root = make_adapter(tmp_path / "it", **settings)
    edit_json(root / "adapter_config.json", modules_to_save=["lm_head"])
    assert {"ADAPTER_ALPHA", "ADAPTER_SAVED_ABSENT"} <= examined(root)
