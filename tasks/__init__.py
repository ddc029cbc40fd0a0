"""The chain, one file a stage. Each stage is a plain function: paths in, one report out.

    base     = prepare_base(out, kind="toy", ...)                 an HF folder, checked
    data     = prepare_data(out, kind="toy", ...)                 train / held-out conversations
    shards   = train(out, base=..., data=..., ...)                every rank's own partitions
    adapter  = gather(out, trained=..., base=..., ...)            PEFT layout, or whole weights
    weights  = merge(out, adapter=..., base=..., ...)             adapter folded into the base
    served   = convert(out, weights=..., ...)                     what vLLM and transformers load
    report   = smoke_eval(out, served=..., trained=..., ...)      vLLM says it is the same model
    version  = register(registry, served=..., gate=...)           models:/name/version @candidate

`stage.py` is the mechanism around each of them: reuse, contract, manifest, rename, log. The words
`artifact`, `contract`, `fingerprint` have a file each. `docs/architecture.md` tells the rest.
"""
