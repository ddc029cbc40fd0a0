"""The model as it is trained: base, adapter, head, packed forward pass.

build         puts the parts together
adapter       section `peft` on the base
packed_model  log-probabilities and scores of packed rows
"""
