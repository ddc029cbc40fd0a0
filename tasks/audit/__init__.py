"""Audit: find faults of a checkpoint in its files, whichever tool wrote it.

run           entry point: `audit(folder)` returns a `Report`
examine       runs all checks on an opened source
source        the opened folder that every check reads; built from `folder` and `weights`
recognise     tells the kind of a folder: adapter, model, DeepSpeed checkpoint, ...
checks/       one module per family of checks: `check(source) -> Iterator[Finding]`
catalogue/    every finding: its meaning, the tool that fails on it, public reports, the fix
repair/       entry point: `repair(folder, out)` writes a repaired copy
"""
