"""Running servers, asked over HTTP: one interface, and one module per dialect.

server     the interface: models, scores, tokens, prompts, generated tokens
connect    recognise the dialect of a server
http       requests: key, time limits, bounded responses, readable errors
scoring    log-probabilities as every dialect returns them
openai, vllm, sglang, llama_cpp      dialects that take token ids
texts, tgi, ollama, transformers_serve   dialects that take texts only
vocabulary texts of token ids, for those
"""
