"""Clean checkpoints have no errors; broken ones have the finding of their fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic import write_hollow
from tasks.audit.check import CHECKS, Finding, Severity
from tasks.audit.checks.exports import read_gguf
from tasks.audit.run import audit
from tasks.audit.source import open_source
from tasks.core.errors import ArtifactError, PlumblineError
from tasks.delivery.base import BaseChoice
from tasks.delivery.plan import Request, prepare
from tasks.delivery.source import examine, open_folder
from tasks.delivery.tokens import Tokens
from tasks.weights.mapping import default_layout
from tests.audit.corpus import Broken, Corpus
from tests.audit.corpus.broken_models import BROKEN_MODELS
from tests.audit.corpus.broken_tuned import BROKEN_TUNED, export
from tests.audit.corpus.clean import CLEAN, PACKED
from tests.audit.corpus.harmless import HARMLESS
from tests.audit.making import edit_json
from tests.weights.making import quiet

BROKEN = {**BROKEN_MODELS, **BROKEN_TUNED}
NEVER = {
    "ARCHITECTURE",
    "CONSTANT_ROWS",
    *(each.code for each in CHECKS if each.module.endswith((".config", ".merge"))),
}
"""Codes that no clean checkpoint may have, except as an info."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("corpus"), CLEAN)


def refused(folder: Path, base: Path | None) -> str:
    """Return why `deliver` refuses the folder from headers; "" if it plans the delivery."""
    try:
        source = open_folder(folder)
        if source.is_adapter and base is None:
            return ""  # nothing to compare with
        if base is not None and not source.is_model:
            source.base = open_source(base)
        examine(source)
        how = {"tokens": Tokens(folder, None), "choice": BaseChoice("original")}
        prepare(Request(source=source, base=base, dtype="bfloat16", max_shard_bytes=10**9, **how))
    except PlumblineError as error:
        return error.message
    return ""


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in [folder, *folder.rglob("*")]
    }


RARE = (
    "deepseek_v3", "falcon", "gemma2", "gemma3", "gemma3-lora", "gemma3_text", "gpt_neox",
    "merged-experts", "moe-all-linear", "moe-linear", "moe-named", "qwen2_5_vl", "qwen2_moe",
    "vl-lora"
)  # fmt: skip
"""Checkpoints that the default suite leaves to `make test-all`."""
BY_CHILD = ("gpt2", "gpt2-lora", "granite", "olmo2", "qwen3_moe")
"""As Mixtral, of which a child process makes the class: six seconds each."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in (*RARE, *BY_CHILD) else ())
        for name in CLEAN
    ],
)
def test_a_clean_checkpoint_has_no_error(
    name: str, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, base = corpus.clean(name), corpus.base_of(name)
    monkeypatch.chdir(folder.parent)  # a relative path is the same to child processes
    before = snapshot(folder)
    for used, values in ((base, True), (base, False), *([(None, True)] if base else ())):
        for finding in audit(Path(folder.name), base=used, values=values).findings:
            assert finding.severity is not Severity.ERROR, finding
            assert finding.severity is Severity.INFO or finding.code not in NEVER, finding
    assert bool(refused(folder, base)) is (name in PACKED)  # no base to merge into
    adapter = corpus.adapter(CLEAN[name].adapter)
    if adapter is not None:
        report = audit(folder, base=base, values=True, adapter=adapter)
        assert not report.errors
        merged = {each.code for each in report.findings if each.code.startswith("MERGE_")}
        assert merged == {"MERGE_PROVEN"}
    assert snapshot(folder) == before


def faults_of(name: str, corpus: Corpus) -> list[str]:
    """Return what is wrong with the audit of a broken checkpoint."""
    case, wrong = BROKEN[name], []
    base, adapter = corpus.base_for(case), corpus.adapter(case.adapter)

    def findings(folder: Path) -> set[Finding]:
        report = audit(folder, base=base, values=case.values, adapter=adapter)
        return {each for each in report.findings if each.code == case.code} | {*report.errors}

    folder = corpus.broken(case)
    reported = findings(folder)
    # Without a fault of its own the checkpoint is broken by the arguments of the audit.
    before = findings(corpus.clean(case.of)) if case.how is not None else set()
    known = {(finding.code, finding.found, finding.where) for finding in before}
    new = [each for each in reported if (each.code, each.found, each.where) not in known]
    added = {each.code for each in new}
    hits = {each.severity.value for each in new if each.code == case.code}
    if not hits or case.severity not in {"", *hits} or "CANNOT_JUDGE" in added:
        wrong.append(f"{name}: {case.code} is not among {sorted(added)}")
    errors = {finding.code for finding in reported if finding.severity is Severity.ERROR}
    not_lora = "is not LORA" in " ".join(finding.found for finding in reported)  # peft serves it
    warned = case.severity == "warning"  # fine for who reads it otherwise than a merge does
    if not (errors or not_lora or warned) and (reason := refused(folder, base)):
        wrong.append(f"{name}: deliver refuses it without a finding: {reason}")
    return wrong


@pytest.mark.parametrize("rare", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_broken_checkpoints_have_the_finding_of_their_fault(rare: bool, corpus: Corpus) -> None:
    names = [name for name, case in BROKEN.items() if (case.of in RARE) is rare]
    assert [fault for name in names for fault in faults_of(name, corpus)] == []


def test_harmless_differences_have_no_finding(corpus: Corpus) -> None:
    wrong = []
    for name, case in HARMLESS.items():
        report = audit(corpus.broken(case), base=corpus.base_for(case), values=case.values)
        absent = [e for e in report.findings if e.code == case.code] if case.code else report.errors
        wrong += [(name, finding.code, finding.found) for finding in absent]
    assert wrong == []


def codes(folder: Path, base: Path | None = None) -> set[str]:
    findings = audit(folder, base=base).findings
    return {finding.code for finding in findings if finding.severity != "info"}


def test_an_export_is_compared_with_the_folder_that_it_was_made_from(
    corpus: Corpus, tmp_path: Path
) -> None:
    assert "EXPORT_DIFFERS" not in codes(corpus.broken(Broken("", "qwen2", export())))
    trained = corpus.broken(Broken("", "qwen2", export(eos_token_id=7)))
    (trained / "model-q8_0.gguf").rename(tmp_path / "model.gguf")
    assert "EXPORT_DIFFERS" not in codes(tmp_path)  # nothing to compare it with
    assert "EXPORT_DIFFERS" in codes(tmp_path, trained)


def test_a_cut_header_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    file = corpus.broken(Broken("", "qwen2", export())) / "model-q8_0.gguf"
    assert read_gguf(file)
    for end in range(0, 400, 7):
        (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:end])
        with pytest.raises(ArtifactError):
            read_gguf(tmp_path / "cut.gguf")


def test_a_context_below_the_rows_of_the_training(corpus: Corpus) -> None:
    folder = corpus.broken(Broken("", "qwen2", lambda *_: None))
    record = folder / "plumbline.witness"
    record.mkdir()
    (record / "scores.json").write_text("{}")
    facts = {"format": 1, "probes": [], "quantization": {}, "longest_row": 900}
    (record / "witness.json").write_text(json.dumps(facts))
    for limit, files in ((512, {"tokenizer_config.json"}), (1024, set()), (10**30, set())):
        edit_json(folder / "config.json", max_position_embeddings=4096)
        edit_json(folder / "tokenizer_config.json", model_max_length=limit)
        short = {f.file for f in audit(folder).findings if f.code == "WITNESS"}
        assert short - {"plumbline.witness/witness.json"} == files, limit


HEADS = {"CAUSAL_LM": 140, "IMAGE_TEXT_TO_TEXT": 55, "SEQUENCE_CLASSIFICATION": 115}
"""Heads, and the least number of classes that can be built with default sizes."""
DEFAULTS = {"arcee": "TOKEN_UNKNOWN", "starcoder2": "TOKEN_UNKNOWN"}
"""Families whose default special token ids belong to a larger vocabulary."""
HOLLOW = "PICKLE_CALLS"
"""Zeros have no line end, at which a pickle that begins like such a header would be damaged."""


def saved(head: str, root: Path) -> Iterator[tuple[str, Path]]:
    """Yield `model_type` and folder of each class of transformers, on sparse weight files.

    Classes are built on the meta device in their default sizes. Each folder is deleted after use.
    """
    import transformers
    from transformers import CONFIG_MAPPING

    mapping = getattr(transformers, f"MODEL_FOR_{head}_MAPPING")
    for kind in sorted(CONFIG_MAPPING):
        classes = mapping.get(CONFIG_MAPPING[kind], ())
        for model_class in classes if isinstance(classes, tuple) else (classes,):
            folder = root / f"{kind}-{model_class.__name__}"
            try:
                save(CONFIG_MAPPING[kind](), model_class, folder)
            except Exception:  # incompatible defaults, missing libraries
                continue
            yield kind, folder
            shutil.rmtree(folder)


def save(config: Any, model_class: Any, folder: Path) -> None:
    import torch

    with quiet():
        with torch.device("meta"):
            model = model_class._from_config(config, dtype=torch.bfloat16)
        shapes = default_layout(model)
        config.architectures, config.dtype = [model_class.__name__], "bfloat16"
        config.save_pretrained(folder)
    write_hollow(folder / "model.safetensors", shapes)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("head", HEADS)
def test_what_every_class_of_transformers_saves_has_no_error(head: str, tmp_path: Path) -> None:
    wrong, count = [], 0
    for kind, folder in saved(head, tmp_path):
        count += 1
        for finding in audit(folder, values=False).findings:  # the files are hollow
            ignored = finding.code in (HOLLOW, DEFAULTS.get(kind))
            if finding.severity is Severity.ERROR and not ignored:
                details = f"{finding.found}; {finding.expected}"
                wrong.append(f"{folder.name}: {finding.code} {finding.where}: {details}")
    assert wrong == []
    assert count >= HEADS[head]
