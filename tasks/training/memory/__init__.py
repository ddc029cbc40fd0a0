"""Estimated memory of a rank, from `config.json`.

estimate  `estimate`: peak memory of one rank; `row_bytes`: the part of one packed row
sizes     dimensions of a decoder
"""
