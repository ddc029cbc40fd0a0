"""Checks of an opened source, in the order of the report; see `tasks.audit.check`.

folder, files, zero         the folder, its files, checkpoints that are not gathered
names, heads, storage       tensors: names and shapes, heads, dtypes and quantisation
adapter, adapter_base, plan PEFT adapters, how they fit their base, the plan of the merge
tokens, templates, config   tokenizers, chat templates, settings
values, base, merge         numbers: by themselves, against the base, against base and adapter
witness                     the record that training left
serving                     settings and exports that servers read otherwise
"""

from tasks.audit.checks import (  # isort: skip -- in the order of the report
    folder as folder,
    files as files,
    names as names,
    zero as zero,
    heads as heads,
    adapter as adapter,
    adapter_base as adapter_base,
    templates as templates,
    tokens as tokens,
    witness as witness,
    serving as serving,
    storage as storage,
    config as config,
    base as base,
    values as values,
    merge as merge,
    plan as plan,  # last: only if nothing else is wrong
)
