"""Estimated memory of a rank, settings that need less, and MFU; from `config.json`.

estimate, activations  `estimate`: peak memory of one rank; the part of one packed row
advice                 `Adviser`: settings that need less memory, and how much less
sizes                  dimensions of a decoder
mfu                    model FLOPs utilisation of a step
"""
