"""Ask a running server whether it is the model that was trained. Neither torch nor vLLM is needed.

servers/    running servers: one module per dialect of HTTP, one interface for all
check       one verdict: what was measured, its limits, likely causes
"""
