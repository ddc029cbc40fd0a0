"""Ask a running server whether it is the model that was trained. Neither torch nor vLLM is needed.

server = connect("http://host:8000")                    servers/: vLLM, SGLang, llama.cpp, OpenAI
reference = read_reference(folder)                      a witness, or a folder that Plumbline served
target = choose(server.models(), folder, model=None, base=None)
report = verify(server, target, reference, "standard")  checks/ on one `Asked`
print(report.text()); report.outcome, report.causes

compare.py has the distance of a server from a fingerprint, checks/weights.py what it looks like.
"""

from tasks.verify.reference import Reference, read_reference
from tasks.verify.report import EXIT_STATUS, Report
from tasks.verify.run import Target, choose, verify
from tasks.verify.servers import connect

__all__ = [
    "EXIT_STATUS", "Reference", "Report", "Target", "choose", "connect",
    "read_reference", "verify",
]  # fmt: skip
