"""Measure models and judge what a served folder computes.

    with ReferenceScorer(log=log, log_path=path) as scorer:          scoring: a transformers child
        setup = Setup(out=out, settings=settings, profile=profile, scorer=scorer, log=log, ...)
        measured = measure(read_question("chat", model, base, reference, data, setup), setup)
        metrics = read_responses(measured, None, None)

prompts         held-out conversations, raw texts, pairs, probes
serve           prompt a served folder in vLLM or transformers, and compare it with the trained one
serve_http      the same with `vllm serve` or llama.cpp, which is verified as a running server
checks          one function for each check of a smoke test
responses       write responses to files, and compute their metrics
measuring       compare the output of gather, merge or convert with the trained model
model_folder    files of a model, and the record that training left
"""
