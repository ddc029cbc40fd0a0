"""Everything a delivery will do, decided before a byte is written.

planning      every operation, from headers and configuration
evidence      the precision of the base in training, by the trainer's own files
work          what is asked and what will be done, as plain data
"""
