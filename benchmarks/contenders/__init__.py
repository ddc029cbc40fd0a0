"""Contenders of the benchmarks: our code and other tools, each in its own process."""
