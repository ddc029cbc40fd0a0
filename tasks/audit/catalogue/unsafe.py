"""Files that run code"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

PICKLE_CALLS = Entry(
    "PICKLE_CALLS",
    Severity.ERROR,
    "A pickle that calls what no checkpoint needs: code that runs when it is loaded",
    "`torch.load` without weights_only=True, and pickle.load, run it with the rights of whoever "
    "loads it",
    "do not load it; delete it, and tell whoever made it",
)
PICKLED_WEIGHTS = Entry(
    "PICKLED_WEIGHTS",
    Severity.WARNING,
    "Weights as a pickle",
    "a pickle is a program; vLLM, transformers and peft read it with weights_only=True, older ones "
    "run it. OpenRLHF saves a ZeRO-3 adapter like this",
    "python flows/audit.py source=DIR fix=true out_dir=<folder> writes safetensors",
    ("OpenRLHF #651",),
)
PICKLE_CLASSES = Entry(
    "PICKLE_CLASSES",
    Severity.INFO,
    "A trainer's pickle with classes in it",
    "it loads only with weights_only=False, which runs whatever the file says",
    "leave it out of what is handed on",
)
PICKLE_OPAQUE = Entry(
    "PICKLE_OPAQUE",
    Severity.WARNING,
    "A pickle whose calls cannot be told: damaged, or too long to go through",
    "what it does when it is loaded is not known",
    "do not load it without weights_only=True",
)
REMOTE_CODE = Entry(
    "REMOTE_CODE",
    Severity.WARNING,
    "The model brings its own code: auto_map, or Python files",
    "with trust_remote_code=True transformers and vLLM run it; without it they refuse the model",
    "read the code; where the class is one of transformers' own, remove auto_map",
    ("LLaMA-Factory #9346",),
)
