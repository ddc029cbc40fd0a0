"""Running servers, asked over HTTP: one interface, and one module per dialect.

server     the interface: models, scores, tokens, prompts, generated tokens
connect    recognise the dialect of a server
http       requests: key, time limits, bounded responses; `refusals` says what is wrong
scoring    log-probabilities as every dialect returns them
openai, completions, sglang, llama_cpp   dialects that take token ids; vLLM is in completions
texts, tgi, ollama, transformers_serve   dialects that take texts only
vocabulary texts of token ids, for those
"""
