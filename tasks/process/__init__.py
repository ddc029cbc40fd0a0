"""Run child processes, read their output, and end them with everything that they have started.

    launch(argv, stage="train", log=log, log_path=path, on_event=on_step)
    with Conversation(argv, stage="score", log=log, log_path=path) as child:
        child.ask({"do": "score"}, timeout_s=60)

launch        a command that runs to its end, or a process that answers requests
output        lines and events in what they print
child         a supervised process; `supervise` is its supervisor
torch_process fast start and clean end of a process with torch
multinode     one run on several machines
"""
