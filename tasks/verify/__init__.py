"""Ask a running server whether it is the model that was trained. Neither torch nor vLLM is needed.

servers/    running servers: one module per dialect of HTTP, one interface for all
reference   what a server is compared with: a witness, or a folder that Plumbline served
check       one verdict: what was measured, its limits, likely causes
"""
