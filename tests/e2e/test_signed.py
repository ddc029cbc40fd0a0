"""A run that signs what it serves; later runs check that before they serve and register it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.pipeline.artifact import MANIFEST, content_digest, inventory
from tasks.pipeline.signature import sign, signature_problem
from tests.e2e.conftest import Run
from tests.keys import make_pair

pytestmark = pytest.mark.slow
SMALL = (
    "+exp=sft_qlora", "train.max_steps=4", "model.steps=20", "smoke.eval_samples=4",
    "smoke.min_stop_rate=0", "smoke.max_degenerate_rate=1", "gate.min_eval_gain=null",
)  # fmt: skip


@pytest.mark.timeout(1500)
def test_a_run_signs_and_later_runs_check(rlhf: Callable[..., Run], tmp_path: Path) -> None:
    private, public = make_pair(tmp_path / "keys")
    runs, quick = tmp_path / "runs", (*SMALL, "smoke.engine=transformers")
    unsigned = rlhf(runs, *quick, f"register.verify={public}")
    assert unsigned.code == 1
    assert "SIGNATURE_WRONG: " in unsigned.output
    assert "model_signing sign key" in unsigned.output

    first = rlhf(runs, *quick, f"register.sign={private}", f"register.verify={public}")
    assert first.code == 0, first.output
    served = Path(first.summary["served"])
    assert signature_problem(served, public) == ""
    recorded = [path for path in runs.rglob("*.json") if path.is_file()]
    assert recorded
    assert [path for path in recorded if "PRIVATE KEY" in path.read_text(errors="replace")] == []

    # vLLM serves the signed folder.
    second = rlhf(runs, *SMALL, "smoke.engine=vllm", f"register.verify={public}")
    assert second.code == 0, second.output
    stages = {stage["name"]: stage["reused"] for stage in second.summary["stages"]}
    assert (stages["convert"], stages["smoke_eval"]) == (True, False)

    # Somebody signs it with another key: refused when it is registered, and when it is served.
    signature = (served / "model.sig").read_bytes()
    (served / "model.sig").unlink()
    sign(served, make_pair(tmp_path / "keys", "other")[0])
    for more, done in (((), True), (("force=[smoke_eval]",), False)):
        refused = rlhf(runs, *quick, f"register.verify={public}", *more)
        assert refused.code == 1, refused.output
        assert "SIGNATURE_WRONG: " in refused.output
        assert ("smoke_eval" in [stage["name"] for stage in refused.summary["stages"]]) == done

    # Somebody alters a file, and the manifest with it: only the signature shows it.
    (served / "model.sig").write_bytes(signature)
    config = json.loads((served / "config.json").read_text())
    (served / "config.json").chmod(0o644)
    (served / "config.json").write_text(json.dumps({**config, "note": "altered"}))
    document = json.loads((served / MANIFEST).read_text())
    tensors, files = inventory(served)
    del files["README.md"]  # listed beside the files
    document |= {"files": files, "digest": content_digest("served", tensors, files)}
    (served / MANIFEST).write_text(json.dumps(document))
    altered = rlhf(runs, *quick, f"register.verify={public}")
    assert altered.code == 1, altered.output
    assert "SIGNATURE_WRONG: " in altered.output
    assert "config.json" in altered.output
    assert "smoke_eval" not in [stage["name"] for stage in altered.summary["stages"]]
