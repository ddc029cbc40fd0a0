"""Stages of the chain, one file each. A stage is a plain function: paths in, one report out.

    base     = prepare_base(out, kind="toy", ...)                 a Hugging Face folder, checked
    data     = prepare_data(out, kind="toy", ...)                 training and evaluation rows
    shards   = train(out, base=..., data=..., ...)                every rank's own partitions
    adapter  = gather(out, trained=..., base=..., ...)            PEFT layout, or full weights
    weights  = merge(out, adapter=..., base=..., ...)             adapter merged into the base
    served   = convert(out, weights=..., ...)                     for vLLM and transformers
    report   = smoke_eval(out, served=..., reference=..., ...)    compares vLLM with training
    version  = register(registry, model, gate)                    models:/name/version @candidate

`pipeline/stage.py` is the mechanism around each of them: reuse, contract, manifest, rename, log.
`docs/architecture.md` is an overview of all packages.
"""
