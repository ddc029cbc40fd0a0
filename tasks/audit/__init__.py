"""Audit: find faults of a checkpoint in its files, whichever tool wrote it.

    report = audit(Path("ckpt"), base=Path("qwen2.5-7b"))
    report.ok                       True if no finding is an error
    print(report.text())
    repair(Path("ckpt"), Path("new"))     a copy without the errors that can be repaired

check         `@check` declares a code at the function that looks for it; `examine` runs all
checks/       the checks; a new one is one function in one of these files
source        the opened and recognised folder that every check reads
scan          tensor data, read once
pickles       names that loading a pickle would use; the harmless are in allowed_names.txt
known         configuration fields, names of tensors, classes of transformers
class_contract  builds a class with transformers, in a child process
repair        writes a copy with other names, index and format
run           `audit` and `Report`
"""
