"""Check every byte of a registered model or a served folder, then serve it with vLLM.

    python flows/serve.py models:/plumbline@champion --port 8000    a registered version
    python flows/serve.py DIR --max-model-len 4096                  a served folder
    python flows/serve.py models:/plumbline/3 verify=key.pub        only if this key signed it

What begins with `-`, and everything after it, is passed to `vllm serve`, which takes the place of
this process. Exit status: that of vLLM; 1 the folder is not what was registered, 2 no such version
or folder, or vLLM is not installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from flows.cli.start import start

    start("flows.cli.tool", "serve")
