"""Ask a running server whether it is the model that was trained. Neither torch nor vLLM is needed.

servers/    running servers: one module per dialect of HTTP, one interface for all
reference   what a server is compared with: a witness, or a folder that Plumbline served
answers     log-probabilities of a server, each name asked once, and what follows from them
alignment   a server's answers by position and id of a fingerprint
comparison  distance of a server from a fingerprint; dose: how much of the adapter answers
power       what the comparison would have seen
check       one verdict: what was measured, its limits, likely causes
"""
