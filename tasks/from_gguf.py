"""from_gguf: a GGUF file as a Hugging Face folder in bf16, whose dequantised weights train.

The folder is made once, among the assets of the Hugging Face cache, by a child process:
`python -m tasks.from_gguf FILE OUT`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tasks.core.errors import ConfigError
from tasks.process.child import PROJECT


def hf_folder(file: Path) -> Path:
    """Return the Hugging Face folder of a GGUF file; make it if it is not there.

    Raises ConfigError if there is no such file, or transformers cannot read it.
    """
    from huggingface_hub import cached_assets_path

    if not file.is_file():
        hint = "model.path=<folder or file>; for model=smollm2: make setup-smollm2"
        raise ConfigError(f"model.path={file}: no such file", hint=hint)
    stat = file.stat()
    facts = (file.resolve(), stat.st_size, stat.st_mtime_ns, version("transformers"))
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:8]
    assets = cached_assets_path("plumbline", namespace="gguf", subfolder="bases")
    folder = assets / f"{file.stem}-{digest}"
    if not folder.is_dir():
        partial = folder.with_name(f".{folder.name}.{os.getpid()}")
        _make(file, partial)
        try:
            partial.rename(folder)
        except OSError:  # another run was faster
            shutil.rmtree(partial)
    return folder


def _make(file: Path, out: Path) -> None:
    print(f"{file.name}: dequantised to bf16, once, into {out.parent}", file=sys.stderr)
    command = [sys.executable, "-m", "tasks.from_gguf", str(file), str(out)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(out, ignore_errors=True)
        raise ConfigError(
            f"model.path={file}: transformers cannot read it",
            details=done.stderr.strip().splitlines()[-3:],
            hint="model.path=<Hugging Face folder of this model>",
        )


def main(file: Path, out: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True)
    ).to(torch.bfloat16)
    model.save_pretrained(out)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
