"""Kernels in C for rollouts on CPUs, compiled on first use: what an adapter adds to a layer
(`adapter.c`), and attention (`attention.c`). Each has a module of its name that loads and calls it.
"""
