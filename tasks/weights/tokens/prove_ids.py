"""Prove the ids of a tokenizer: tokenizer.json, read by `tokenizers` alone, is the truth.

transformers 5 rebuilds the pipeline of some classes and takes only the vocabulary from
tokenizer.json, so that a text becomes other ids than in the training. `misread` compares what
AutoTokenizer loads, which training and vLLM use, in a child process; this file is its program too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

TEXTS = (
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
"""Digits, runs of blanks, newlines, tabs, accents, scripts, emoji, code, a leading blank."""
_LEADING = (" a leading blank", "  two of them")
_MOST_SPECIAL = 64
_WAIT_S = 300.0
_ONLY = ("PATH", "LD_LIBRARY_PATH", "LANG", "HOME", "TMPDIR")
Encode = Callable[[str], Sequence[int]]


def texts_of(special: Iterable[str], prompts: Iterable[str] = ()) -> Iterator[str]:
    """Yield texts to compare: `TEXTS`, special tokens in a text, prompts, leading blanks."""
    yield from TEXTS
    for token in list(special)[:_MOST_SPECIAL]:
        yield f"Say {token}it 12 {token}\n on"
    yield from prompts
    yield from _LEADING


def is_leading(reason: str) -> bool:
    """Return True if only texts that begin with a blank differ: prompts do not."""
    return reason.startswith(tuple(repr(text) for text in _LEADING))


def difference(truth: Encode, other: Encode, texts: Iterable[str]) -> str:
    """Return the first text of which two tokenizers make other ids; "" if there is none."""
    for text in texts:
        ids, others = list(truth(text)), list(other(text))
        if ids != others:
            at = next((i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b),
                      min(len(ids), len(others)))  # fmt: skip
            shown = text if len(text) < 50 else text[:50] + "..."
            return (
                f"{shown!r} becomes {len(others)} ids, by tokenizer.json {len(ids)}; at "
                f"{at}: {others[at : at + 3]} instead of {ids[at : at + 3]}"
            )
    return ""


def plain_encoder(tokenizer: Any) -> Encode:
    """Return the encoder of a `tokenizers.Tokenizer`: no template, no truncation, no padding."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def misread(folder: Path) -> str:
    """Return how transformers misreads the tokenizer.json of a folder; "" if it does not.

    Returns "" for folders without tokenizer.json, and if the tokenizer does not load: then nothing
    is trained or served in silence. Raises ArtifactError if the comparison itself failed.
    """
    if not (folder / "tokenizer.json").is_file():
        return ""
    stamps = [
        (name, (folder / name).stat().st_mtime_ns)
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json")
        if (folder / name).is_file()
    ]
    return _asked(folder.absolute(), tuple(stamps))


def misread_as(folder: Path, pipeline: Mapping[str, Any]) -> str:
    """Return as `misread` does, without transformers, for a class that builds this pipeline.

    `pipeline` has `normalizer`, `pre_tokenizer`, and `model` without vocabulary and merges.
    """
    return _asked(folder.absolute(), (), json.dumps(pipeline))


@lru_cache(maxsize=16)
def _asked(folder: Path, stamps: tuple[tuple[str, int], ...], pipeline: str = "") -> str:
    environment = {name: os.environ[name] for name in _ONLY if name in os.environ}
    command = [sys.executable, "-I", __file__, str(folder)]
    try:
        done = subprocess.run(
            command, input=pipeline.encode(), capture_output=True, timeout=_WAIT_S, check=False,
            env={**environment, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        return str(json.loads(done.stdout.splitlines()[-1])["differs"])
    except subprocess.TimeoutExpired as error:
        raise _unproven(folder, f"no answer within {_WAIT_S:.0f} s") from error
    except (ValueError, LookupError) as error:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise _unproven(folder, lines[-1] if lines else f"exit {done.returncode}") from error


def _unproven(folder: Path, reason: str) -> Exception:
    from tasks.core.errors import ArtifactError  # the child, an isolated program, has no `tasks`

    return ArtifactError(f"{folder}: its token ids could not be compared: {reason}")


def _compare(folder: Path) -> str:
    """Compare both readings of a folder; runs in the child."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    try:
        raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
        loaded = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception:
        return ""  # every loader stops, and says so
    if not loaded.is_fast:
        return ""  # another program, which reads other files
    special = [token.content for token in raw.get_added_tokens_decoder().values()]
    raw.encode_special_tokens = bool(getattr(loaded, "split_special_tokens", False))
    prompts = []
    if loaded.chat_template:
        turns = [{"role": "user", "content": text} for text in TEXTS[:4]]
        for turn in turns:
            try:
                prompts.append(loaded.apply_chat_template([turn], tokenize=False))
            except Exception:
                break  # the template's own checks report it
    return difference(
        plain_encoder(raw),
        lambda text: loaded.encode(text, add_special_tokens=False),
        texts_of(special, prompts),
    )


def _compare_built(folder: Path, pipeline: Mapping[str, Any]) -> str:
    """Compare tokenizer.json with a class that takes its vocabulary; runs in the child."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:
        return ""  # every loader stops, and says so
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    document = json.loads((folder / "tokenizer.json").read_bytes())
    model, options = document["model"], dict(pipeline["model"])
    if options.get("unk_token"):
        options["unk_token"] = model.get("unk_token")
    vocabulary = model["vocab"]
    if options["type"] != "Unigram" and isinstance(vocabulary, list):
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    options["vocab"] = vocabulary
    if options["type"] == "BPE":
        options["merges"] = model.get("merges", [])
    charsmap = _charsmap(document["normalizer"])
    built = {
        "normalizer": _with_charsmap(pipeline["normalizer"], charsmap),
        "pre_tokenizer": pipeline["pre_tokenizer"],
        "model": options,
    }
    other = Tokenizer.from_str(json.dumps({**document, **built}))
    return difference(plain_encoder(tokenizer), plain_encoder(other), texts_of(special))


def _charsmap(step: Any) -> str | None:
    """Return the table of characters of a file's normalizer, which pipelines do not name."""
    steps = step.get("normalizers", [step]) if isinstance(step, dict) else []
    tables = [part["precompiled_charsmap"] for part in steps if part["type"] == "Precompiled"]
    return tables[0] if tables else None


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
    if pipeline:
        reason = _compare_built(Path(sys.argv[1]), json.loads(pipeline))
    else:
        sys.modules["torch"] = None  # type: ignore[assignment]  # seconds that no tokenizer needs
        reason = _compare(Path(sys.argv[1]))
    print(json.dumps({"differs": reason}))
