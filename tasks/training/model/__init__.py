"""The model that is trained: base, adapter, head, forward pass over packed rows.

build                    `load_tokenizer` and `load_model`: base, score head, section `peft`
packed_model, attention  log-probs and scores of packed rows; ranks that share rows (Ulysses)
families                 facts about model families from config.json
probe                    fingerprint of the live engine
"""
