"""Prove the ids of a tokenizer: tokenizer.json, read by `tokenizers` alone, is the truth.

transformers 5 rebuilds the pipeline of some classes and takes only the vocabulary from
tokenizer.json, so that a text becomes other ids than in the training. `misread` compares what
AutoTokenizer loads, which training and vLLM use, in a child process; this file is its program too.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

_TEXTS = (
    "The capital of France is Paris.", "What is 650 + 84 * 1823 - 2023?", "3.14159, 1,000,000",
    "a  b   c    d", "trailing  ", "one\ntwo\n\nthree\n\n\n", "\ta\t\tb\r\nc",
    "caf\u00e9 na\u00efve fa\u00e7ade \u00fcber \u00c5ngstr\u00f6m", "e\u0301 \u00e9",
    "\u4eca\u65e5\u306f\u3044\u3044\u5929\u6c17 \u4eba\u5de5\u667a\u80fd \ud55c\uad6d\uc5b4",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0645\u0631\u062d\u0628\u0627",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 \u2764\ufe0f",
    "def f(x):\n    if x < 2:\n        return x\n    return f(x - 1) + f(x - 2)\n",
    "for (int i = 0; i < n; i++) { s += v[i]; }", '{"name": "Ada", "born": [1815, null]}',
    "It's we're I'LL don't", "HELLO World hELLO", "\u201cquotes\u201d \u2014 dash\u2026 \u20ac5",
    "https://example.org/a_b?c=1&d=%20", "x_1 = y**2 // z", "\u00a0no\u200bbreak\u3000wide",
    "\ufb01ne \u2460 \uff21", "antidisestablishmentarianism",
)  # fmt: skip
"""Digits, runs of blanks, newlines, tabs, accents, scripts, emoji, code."""
_LEADING = (" a leading blank", "  two of them")
_MOST_SPECIAL = 64
_WAIT_S = 300.0
_ONLY = ("PATH", "LD_LIBRARY_PATH", "LANG", "HOME", "TMPDIR")


def misread(folder: Path) -> str:
    """Return how transformers misreads the tokenizer.json of a folder; "" if it does not.

    Returns "" for folders without tokenizer.json, and if the tokenizer does not load: then nothing
    is trained or served in silence. Raises ArtifactError if the comparison itself failed.
    """
    return _compared(folder) if (folder / "tokenizer.json").is_file() else ""


def misread_as(folder: Path, pipeline: Mapping[str, Any]) -> str:
    """Return as `misread` does, without transformers, for a class that builds this pipeline.

    `pipeline` has `normalizer`, `pre_tokenizer`, and `model` without vocabulary and merges.
    """
    return _compared(folder, json.dumps(pipeline))


def is_leading(reason: str) -> bool:
    """Return True if only texts that begin with a blank differ: prompts do not."""
    return reason.startswith(tuple(repr(text) for text in _LEADING))


_ANSWERS: dict[str, str] = {}
"""Differences by the content that they depend on: the folder that a delivery writes has its
source's tokenizer, and each comparison starts a process that imports transformers."""
_NOT_OF_TOKENIZERS = (
    "dtype", "torch_dtype", "eos_token_id", "pad_token_id", "quantization_config",
)  # fmt: skip
"""Fields of config.json that no tokenizer reads, and a delivery writes."""


def _compared(folder: Path, pipeline: str = "") -> str:
    # The child, an isolated program, has no `tasks`.
    from tasks.weights.files.documents import optional_json
    from tasks.weights.files.folder import side_files

    config = {} if pipeline else optional_json(folder / "config.json")
    fields = {key: value for key, value in config.items() if key not in _NOT_OF_TOKENIZERS}
    content = hashlib.sha256(json.dumps([pipeline, fields], sort_keys=True).encode())
    for path in [folder / "tokenizer.json"] if pipeline else side_files(folder):
        content.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    key = content.hexdigest()
    if key not in _ANSWERS:
        _ANSWERS[key] = _asked(folder.absolute(), pipeline)
    return _ANSWERS[key]


def _asked(folder: Path, pipeline: str) -> str:
    from tasks.core.errors import ArtifactError

    environment = {name: os.environ[name] for name in _ONLY if name in os.environ}
    command, reason = [sys.executable, "-I", __file__, str(folder)], f"no answer within {_WAIT_S} s"
    try:
        done = subprocess.run(
            command, input=pipeline.encode(), capture_output=True, timeout=_WAIT_S, check=False,
            env={**environment, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        printed = done.stderr.decode(errors="replace").strip().splitlines()
        reason = printed[-1] if printed else f"exit {done.returncode}"
        return str(json.loads(done.stdout.splitlines()[-1])["differs"])
    except (subprocess.TimeoutExpired, ValueError, LookupError) as error:
        text = f"{folder}: its token ids could not be compared: {reason}"
        raise ArtifactError(text) from error


# In the child


def _compare(folder: Path, pipeline: Mapping[str, Any] | None) -> str:
    """Return the first text that another reading of tokenizer.json encodes differently, or ""."""
    from tokenizers import Tokenizer

    try:
        truth = Tokenizer.from_file(str(folder / "tokenizer.json"))
        loaded: Any = None if pipeline else _loaded(folder)
    except Exception:
        return ""  # every loader stops, and says so
    special = [token.content for token in truth.get_added_tokens_decoder().values()]
    texts = [*_TEXTS, *(f"Say {token}it 12 {token}\n on" for token in special[:_MOST_SPECIAL])]
    if pipeline:
        encode = _encoder(Tokenizer.from_str(_built(folder, pipeline)))
    elif loaded.is_fast:
        texts += _prompts(loaded)
        truth.encode_special_tokens = bool(getattr(loaded, "split_special_tokens", False))
        encode = partial(loaded.encode, add_special_tokens=False)
    else:
        return ""  # another program, which reads other files
    for text in (*texts, *_LEADING):
        ids, others = _encoder(truth)(text), encode(text)
        if ids != others:
            pairs = enumerate(zip(ids, others, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(others)))
            shown = text if len(text) < 50 else text[:50] + "..."
            return (
                f"{shown!r} becomes {len(others)} ids, by tokenizer.json {len(ids)}; at "
                f"{at}: {others[at : at + 3]} instead of {ids[at : at + 3]}"
            )
    return ""


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Return the encoder of a `tokenizers.Tokenizer`: no template, no truncation, no padding."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _loaded(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _prompts(loaded: Any) -> list[str]:
    """Return some texts as the chat template writes them; templates have checks of their own."""
    prompts: list[str] = []
    try:
        for text in _TEXTS[:4] if loaded.chat_template else ():
            turns = [{"role": "user", "content": text}]
            prompts.append(loaded.apply_chat_template(turns, tokenize=False))
    except Exception:
        pass
    return prompts


def _built(folder: Path, pipeline: Mapping[str, Any]) -> str:
    """Return the tokenizer.json of a class that takes only the vocabulary from the folder's."""
    document = json.loads((folder / "tokenizer.json").read_bytes())
    model, options = document["model"], dict(pipeline["model"])
    if options.get("unk_token"):
        options["unk_token"] = model.get("unk_token")
    options["vocab"] = model["vocab"]
    if options["type"] != "Unigram" and isinstance(model["vocab"], list):
        options["vocab"] = {piece: number for number, (piece, _) in enumerate(model["vocab"])}
    if options["type"] == "BPE":
        options["merges"] = model.get("merges", [])
    step = document["normalizer"]
    steps = step.get("normalizers", [step]) if isinstance(step, dict) else []
    maps = [part["precompiled_charsmap"] for part in steps if part["type"] == "Precompiled"]
    built = {
        "normalizer": _with_charsmap(pipeline["normalizer"], maps[0] if maps else None),
        "pre_tokenizer": pipeline["pre_tokenizer"],
        "model": options,
    }
    return json.dumps({**document, **built})


def _with_charsmap(step: Any, charsmap: str | None) -> Any:
    """Return a normalizer with the file's table of characters; without that step if it has none."""
    if not isinstance(step, dict):
        return step
    if step["type"] == "Sequence":
        steps = [_with_charsmap(part, charsmap) for part in step["normalizers"]]
        return {**step, "normalizers": [part for part in steps if part]}
    if step["type"] != "Precompiled":
        return step
    return {**step, "precompiled_charsmap": charsmap} if charsmap else None


if __name__ == "__main__":
    pipeline = sys.stdin.read()
    if not pipeline:
        sys.modules["torch"] = None  # type: ignore[assignment]  # seconds that no tokenizer needs
    print(json.dumps({"differs": _compare(Path(sys.argv[1]), json.loads(pipeline or "null"))}))
