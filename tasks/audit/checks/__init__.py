"""Checks of an opened source. Each module has `check(source) -> Iterator[Finding]`.

`tasks.audit.examine` lists them in the order of the report.

folder_checks, files     the folder, its files and the index
headers, experts         tensor names and shapes
text/, adapters/         tokenizers and embeddings; PEFT adapters and merged models
"""
