"""The model that is trained: base, adapter, head, forward pass over packed rows.

build                             `load_tokenizer` and `load_model`: base, score head, adapter
adapter                           section `peft`
packed_model, attention, packable log-probs and scores of packed rows; which families
head                              log-probs from hidden states
gather_params                     full tensors under ZeRO-3
probe                             fingerprint of the live engine
"""
