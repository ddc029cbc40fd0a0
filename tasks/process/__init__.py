"""Run child processes, read their output, and end them with everything that they have started.

launch        run a command to its end
json_worker   a process that stays alive and answers requests
multinode     one run on several machines
"""
