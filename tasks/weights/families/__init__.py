"""Map tensors of a checkpoint on disk to tensors of the model in memory, and plan with that map.

conversion    `trace`: run transformers' own conversion on tensors without data (`traced`)
merging       `plan_merge`: terms of adapters -> operations on disk
gathering     `plan_full`: trained tensors by live name -> operations on disk

transformers 5 renames and fuses tensors while it loads, for example all experts of a layer. PEFT
uses the names in memory, servers read those on disk. `plain` lists families without a difference.
"""
