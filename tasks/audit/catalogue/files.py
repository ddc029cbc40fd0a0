"""Files and index"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

WEIGHTS_MISSING = Entry(
    "WEIGHTS_MISSING",
    Severity.ERROR,
    "A configuration without weights",
    "`no file named model.safetensors` in transformers, `Cannot find any model weights` in vLLM; a "
    "save that was interrupted, or that a rank waited for in vain, ends like this",
    "save again; where a trainer's own checkpoint lies beside it, gather that",
    (
        "LLaMA-Factory #2703", "LLaMA-Factory #10410", "LLaMA-Factory #10230",
        "LLaMA-Factory #3238", "OpenRLHF #1126", "Megatron-Bridge #1883",
    ),
)  # fmt: skip
STRAY_WEIGHT_FILE = Entry(
    "STRAY_WEIGHT_FILE",
    Severity.ERROR,
    "A weight file that belongs to no checkpoint of the folder, and that a loader would take",
    "vLLM takes every *.safetensors of a folder without an index, every *.bin of one without "
    "safetensors, and nothing but consolidated*.safetensors where there is one: `There is no "
    "module or parameter named 'v_head' in Qwen3ForCausalLM`",
    "move the file out of the folder, or into a folder below it; a copy without it: "
    "python flows/audit.py source=DIR fix=true out_dir=<folder>",
    ("LLaMA-Factory #8635", "LLaMA-Factory #7511"),
)
TWO_WEIGHT_SETS = Entry(
    "TWO_WEIGHT_SETS",
    Severity.WARNING,
    "The same weights twice: as safetensors and as .bin",
    "transformers, peft and vLLM take the safetensors, whichever is newer; OpenRLHF's ZeRO-3 save "
    "writes the .bin and, when it breaks off, leaves empty safetensors beside it",
    "delete the set that is not meant",
    ("OpenRLHF #651",),
)
INDEX_UNREADABLE = Entry(
    "INDEX_UNREADABLE",
    Severity.ERROR,
    "The index of the shards cannot be read",
    "transformers and vLLM read it first and stop there",
    "rebuild it: python flows/audit.py source=DIR fix=true out_dir=<folder>",
)
INDEX_PATH = Entry(
    "INDEX_PATH",
    Severity.ERROR,
    "The index names a path instead of a file beside it",
    "a loader that follows it reads files that are none of this checkpoint's",
    "do not load it; ask whoever made it",
)
INDEX_MISSING_FILE = Entry(
    "INDEX_MISSING_FILE",
    Severity.ERROR,
    "The index names files that are not there",
    "`Weight files referenced in index but missing` in vLLM, FileNotFoundError in transformers",
    "copy the files from where the checkpoint was made",
)
INDEX_MISSING_KEY = Entry(
    "INDEX_MISSING_KEY",
    Severity.ERROR,
    "The index names tensors that its files do not hold",
    "transformers initialises them at random with a warning; vLLM stops with `Following weights "
    "were not initialized from checkpoint`",
    "take the index that was written with the files; rebuild it where nothing is missing",
    ("transformers #40968", "Relax PR #148"),
)
KEY_NOT_IN_INDEX = Entry(
    "KEY_NOT_IN_INDEX",
    Severity.ERROR,
    "Tensors that the index does not name",
    "transformers does not load them; vLLM streams whole files and loads them: two models",
    "rebuild the index: python flows/audit.py source=DIR fix=true out_dir=<folder>",
)
KEY_TWICE = Entry(
    "KEY_TWICE",
    Severity.ERROR,
    "A tensor in two files",
    "which one wins depends on the loader and on the order of files",
    "remove the file that is a rest of an earlier save",
)
INDEX_ABSENT = Entry(
    "INDEX_ABSENT",
    Severity.ERROR,
    "Shards without an index",
    "transformers looks for model.safetensors or an index and finds neither",
    "rebuild it: python flows/audit.py source=DIR fix=true out_dir=<folder>",
    ("unsloth #1521", "unsloth #1122"),
)
SHARDS_INCOMPLETE = Entry(
    "SHARDS_INCOMPLETE",
    Severity.ERROR,
    "Shards are counted in their names, and some are not there",
    "vLLM loads what it finds and stops with `not initialized from checkpoint`, or serves noise",
    "copy the missing files from where the checkpoint was made",
)
STALE_INDEX = Entry(
    "STALE_INDEX",
    Severity.WARNING,
    "A single weight file beside an index that does not name it",
    "transformers loads the single file; vLLM follows the index: two different models, or a "
    "FileNotFoundError",
    "delete the index, or the single file, whichever is the rest of an earlier save",
    ("verl #7193",),
)
INDEX_TOTAL_SIZE = Entry(
    "INDEX_TOTAL_SIZE",
    Severity.WARNING,
    "total_size in the index is not the size of the tensors in bytes",
    "planners of memory and of downloads count on it; verl's distributed writer puts the number of "
    "elements there",
    "rebuild the index: python flows/audit.py source=DIR fix=true out_dir=<folder>",
)
