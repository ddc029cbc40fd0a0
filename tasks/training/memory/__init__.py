"""Estimated memory of a rank, from `config.json`.

estimate, activations  `estimate`: peak memory of one rank; the part of one packed row
sizes                  dimensions of a decoder
"""
