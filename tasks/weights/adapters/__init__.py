"""Adapters: a PEFT folder read, checked against a model, and turned into terms of live tensors.

    adapter = read_adapter(folder)                        # headers and configuration
    found = changes([(adapter, 1.0)], live)               # live name -> terms, replacements
    found.findings                                        # everything that does not fit
    require_values([adapter], found.copies)               # the one pass over its data

`live` describes the model in memory (`live.live_model`), because PEFT speaks of modules and of the
names they have there. Which keys of a checkpoint those are is the business of
`tasks.weights.families`; the arithmetic is that of `tasks.weights.execute.kernels`.
"""
