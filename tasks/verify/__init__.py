"""Ask a running server whether it is the model that was trained. Neither torch nor vLLM is needed.

server = connect("http://host:8000")                    dialects: vLLM, SGLang, llama.cpp, OpenAI
reference = read_reference(folder)                      a witness, or a folder that Plumbline served
target = choose(server.models(), folder, model=None, base=None)
report = verify(server, target, reference, "standard")
print(report.text()); report.outcome, report.causes

The checks stand in weights, prompt, sampling and load: each takes `Asked` (compare), the server
and the reference, and returns one row of the report.
"""

from tasks.verify.dialects import connect
from tasks.verify.reference import Reference, read_reference
from tasks.verify.run import EXIT_STATUS, Report, Target, choose, verify

__all__ = [
    "EXIT_STATUS", "Reference", "Report", "Target", "choose", "connect",
    "read_reference", "verify",
]  # fmt: skip
