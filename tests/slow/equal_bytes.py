"""Compare what this checkout delivers with what another one does, byte for byte.

python -m tests.slow.equal_bytes ../other-checkout      # a line for each kind of source
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tasks.pipeline.artifact import open_artifact
from tests.commands import environment
from tests.conftest import PROJECT
from tests.delivery import test_adapters as grown
from tests.delivery.making import with_rows
from tests.delivery.test_heads import reward_adapter
from tests.tiny import FAMILIES, save_model
from tests.weights import heads, making
from tests.weights.making import NF4, Spread
from tests.weights.packing import scale_fp8

Case = tuple[Path, Path | None, tuple[str, ...]]  # source, base, settings
ORIGINAL, SMALL = "merge.base=original", "convert.max_shard_size=90KB"
NEAREST, FOUR = "merge.rounding=nearest", "merge.base=dequantized"
OF_THE_RUN = ("manifest.json", "contract.json", "README.md")


def cases(root: Path) -> dict[str, Callable[[], Case]]:
    source, base = root / "source", root / "base"

    def lora(family: str, *words: str, fp8: bool = False, **how: Any) -> Case:
        making.make_base(base, family, max_shard_size="5GB" if fp8 else "100KB")
        making.trained_model(base, Spread(**how), 1).save_pretrained(source)
        if fp8:
            scale_fp8(base, root / "fp8", "deepseek")
        return source, root / "fp8" if fp8 else base, (*words, SMALL)

    def of_family(family: str, **settings: Any) -> Case:
        save_model(base, FAMILIES[family].config(vocab_size=300))
        making.save_adapter(source, base, family, **settings)
        return source, base, (ORIGINAL,)

    def more_rows(tied: bool, options: dict[str, Any], _: bool) -> Case:
        config = making.small_config("qwen")
        config.tie_word_embeddings = tied
        save_model(base, config, seed=1)
        model = with_rows(base, grown.MORE)
        return grown.trained(model, source, **options), base, (ORIGINAL,)

    def shards(**how: Any) -> Case:
        ours = open_artifact(making.make_base(base, "qwen").path)
        return making.write_trained(source, ours, Spread(world_size=3, **how)), base, ()

    def model(make: Callable[..., Any], family: str, **how: Any) -> Case:
        make(source, family, **how)
        return source, None, (SMALL,)

    return {
        "LoRA, tied": lambda: lora("qwen", ORIGINAL),
        "rsLoRA, untied": lambda: of_family("llama", use_rslora=True),
        "rounded to nearest": lambda: lora("llama", ORIGINAL, NEAREST),
        "QLoRA": lambda: lora("llama", FOUR, quantization=NF4),
        "base in fp8": lambda: lora("llama", "check_base=false", fp8=True),
        "DoRA": lambda: of_family("qwen2", use_dora=True),
        "experts": lambda: of_family("mixtral"),
        "Conv1D": lambda: of_family("gpt2"),
        **{name: lambda case=case: more_rows(*case) for name, case in grown.CASES.items()},  # type: ignore[misc]
        "reward adapter": lambda: (*reward_adapter(root, "llama")[1::-1], (ORIGINAL,)),
        "shards of an adapter": shards,
        "shards of a model": lambda: shards(full=True),
        "TRL's policy": lambda: model(heads.save_trl, "qwen"),
        "OpenRLHF's rewards": lambda: model(heads.save_openrlhf, "qwen", mean=1.5, std=2.5),
    }


def delivered(checkout: Path, case: Case, place: Path) -> dict[str, str]:
    """Return a hash of each file that an engine reads; if there is none, the output."""
    words = [f"source={case[0]}", f"out={place / 'out'}", f"paths.runs={place}", *case[2]]
    words += ["smoke.engine=none", *([] if case[1] is None else [f"base={case[1]}"])]
    argv = [sys.executable, str(checkout / "flows" / "deliver.py"), *words]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=False)
    files = [] if done.returncode else list((place / "out").iterdir())
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    hashes = {name: digest for name, digest in hashes.items() if name not in OF_THE_RUN}
    return hashes or {f"{checkout}: {(done.stdout + done.stderr)[-1000:]}": str(place)}


if __name__ == "__main__":
    for name in cases(Path()):
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
            sides, places = (PROJECT, Path(sys.argv[1]).resolve()), (Path(folder, s) for s in "ab")
            ours, theirs = pool.map(delivered, sides, [cases(Path(folder))[name]()] * 2, places)
        wrong = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
        print(f"{name}: {', '.join(wrong) or f'equal, {len(ours)} files'}", flush=True)
