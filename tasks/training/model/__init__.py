"""The model that is trained: base, adapter, head, forward pass over packed rows.

build, base                       `load_tokenizer` and `load_model`; the base model
adapter                           section `peft`
packed_model, attention, packable log-probs and scores of packed rows; which families
head, score_head                  log-probs from hidden states; the head of a reward model
gather_params                     full tensors under ZeRO-3
probe                             fingerprint of the live engine
"""
