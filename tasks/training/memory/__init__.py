"""Estimated memory of a rank, and MFU; from `config.json`.

estimate, activations  `estimate`: peak memory of one rank; the part of one packed row
sizes                  dimensions of a decoder
mfu                    model FLOPs utilisation of a step
"""
