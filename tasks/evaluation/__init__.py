"""Measuring models: which one is loaded, by whom, and how its responses are judged.

scoring         fingerprints and scores, from the parent's side
serve           a served folder in vLLM or transformers
smoke_*         checks of `smoke_eval` for chat models, raw texts and reward models
trained_artifact   drift from the trained model, shared by gather, merge and convert
"""
