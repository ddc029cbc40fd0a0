"""PEFT adapters: read a folder, check it against a model, make terms for the live tensors.

    adapter = read_adapter(folder)                        # `read`: headers and configuration
    total = changes([(adapter, 1.0)], live)               # `changes`: terms by live name
    total.findings                                        # everything that does not fit
    require_values([adapter], total.copies)               # `values`: reads the data once

`live` is the model in memory (`live.live_model`), because PEFT names modules as they are there.
`tasks.weights.families` maps live names to keys on disk.
"""
