"""Checks of PEFT adapters and merged models.

adapter, adapter_base      entry points: an adapter by itself, and with its base
merge_plan                 entry point: the plan of a delivery, for an adapter with its base
merge_proof                entry point: a merged model against base and adapter
rounding                   entry point: what a merge to nearest would keep of an adapter
adapter_keys               sorts tensor names into LoRA pairs, token rows and full tensors
adapter_tensors            the tensors of an adapter against its settings
same_bytes                 compares tensors of two folders
"""
