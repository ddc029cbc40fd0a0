"""Measure models and judge what a served folder computes.

scoring            measure a model in the transformers child: fingerprints, scores, greedy tokens
trained_artifact   read the record that training left
measuring          compare the output of gather, merge or convert with the trained model
serving_config     write config.json and generation_config.json, and check that all files agree
serve              prompt a served folder in vLLM or transformers
http_verification  the same with `vllm serve`, which is verified as a running server
smoke              serve a model and compare it with the trained one (`tasks/smoke_eval.py`)
smoke_prompts      prompts of a smoke test: conversations, raw texts, pairs, probes
smoke_checks       one function for each check of a smoke test
responses          write responses to files, and compute their metrics
"""
