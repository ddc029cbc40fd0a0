"""A base that is stored in 4 bits already: bitsandbytes' NF4 and FP4, as `save_pretrained` writes.

    with open_base(folder) as base:             # an ordinary bf16 base, to look at
        plan = plan_merge(base.tensors, ...)
        plan = decoding(plan, {"base": base})   # its packed tensors are decoded on the way

Every packed matrix lies in five to seven tensors. `states.py` finds and checks them, `source.py`
shows them as the one matrix that they are, `plans.py` says in the plan how each is decoded, and
`decode.py` does it, in bitsandbytes' own code and without a GPU. What comes out of a merge is an
ordinary model; `quantization_config` is gone from its config.json.
"""
