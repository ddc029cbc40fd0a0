"""Checks of an opened source, in the order of the report; see `tasks.audit.check`.

files              the folder, its files and weights; checkpoints that are not gathered
names, heads       names and shapes of tensors, heads
adapter            PEFT adapters, and what servers leave out of them
templates, tokens  chat templates, tokenizers
witness            the record that training left
config             settings; dtypes and quantisation
exports            GGUF files and Modelfiles
values, merge      numbers: by themselves, against the base; merges of adapters
"""

from tasks.audit.checks import (  # isort: skip -- in the order of the report
    files as files,
    names as names,
    heads as heads,
    adapter as adapter,
    templates as templates,
    tokens as tokens,
    witness as witness,
    config as config,
    exports as exports,
    values as values,
    merge as merge,  # last: it plans a merge only if nothing else is wrong
)
