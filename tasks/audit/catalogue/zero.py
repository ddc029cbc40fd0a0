"""What ZeRO leaves"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

_GATHER = "python flows/deliver.py source=DIR base=<the base, for an adapter> out=<folder>"

ZERO_NOT_GATHERED = Entry(
    "ZERO_NOT_GATHERED",
    Severity.INFO,
    "A DeepSpeed checkpoint: every rank's part, in fp32, no model yet",
    "transformers, peft and vLLM find no weights in it; the trainer that wrote it resumes from it",
    _GATHER,
    ("LLaMA-Factory #2604", "LLaMA-Factory #2161"),
)
ZERO_NOT_ALL_READ = Entry(
    "ZERO_NOT_ALL_READ",
    Severity.WARNING,
    "A DeepSpeed checkpoint of so many ranks that their files were counted, not read",
    "files of several steps or cuts would not be seen here; gathering reads all of them before it "
    "writes, and refuses what does not add up",
    _GATHER,
)
ZERO_BESIDE = Entry(
    "ZERO_BESIDE",
    Severity.INFO,
    "DeepSpeed's shards lie beside the saved weights",
    "what was saved wrongly beside them is still in the shards",
    _GATHER,
)
ZERO_RANK_MISSING = Entry(
    "ZERO_RANK_MISSING",
    Severity.ERROR,
    "Files of some ranks are not there",
    "`zero_to_fp32.py` and a resume stop; parts of every tensor are in the missing files. Several "
    "nodes without a shared file system each keep their own",
    "copy the files of all ranks of one step into the folder",
)
ZERO_STEPS_MIXED = Entry(
    "ZERO_STEPS_MIXED",
    Severity.ERROR,
    "Files of several steps or runs in one checkpoint",
    "`zero_to_fp32.py` joins them without a word: a model that never existed",
    "take another step's folder",
)
ZERO_WORLD_DISAGREES = Entry(
    "ZERO_WORLD_DISAGREES",
    Severity.ERROR,
    "Files of runs with different numbers of ranks, or different ZeRO stages",
    "parts of different cuts do not add up to tensors; an older save was overwritten by a smaller "
    "run",
    "keep the files of one run",
    ("OpenRLHF #1067",),
)
ZERO_LATEST_DANGLING = Entry(
    "ZERO_LATEST_DANGLING",
    Severity.ERROR,
    "The file `latest` names a step that is not there, or none is named among several",
    "a resume stops, or starts from nothing without a word",
    "name the step's folder itself: source=DIR/global_step<N>",
    ("OpenRLHF PR #1208",),
)
ZERO_PARALLEL = Entry(
    "ZERO_PARALLEL",
    Severity.ERROR,
    "States of tensor, pipeline or expert parallel training",
    "they are cut in other ways than ZeRO's, and are not read here",
    "convert them with the trainer that wrote them",
)
ZERO_EMPTY = Entry(
    "ZERO_EMPTY",
    Severity.ERROR,
    "Parameters of the model that no rank holds data of",
    "gathering them gives a model with holes",
    "save with exclude_frozen_parameters=False, or give the base they were frozen from: base=DIR",
)
ZERO_UNUSABLE = Entry(
    "ZERO_UNUSABLE",
    Severity.ERROR,
    "Files of a DeepSpeed checkpoint that cannot be read, or do not fit each other",
    "neither a resume nor `zero_to_fp32.py` gets a model out of it",
    "copy the files of every rank of one step again, or take another step",
)
PARTITIONS_WHOLE = Entry(
    "PARTITIONS_WHOLE",
    Severity.INFO,
    "Every rank's part as Plumbline writes it, complete, no model yet",
    "transformers, peft and vLLM find no weights in it",
    _GATHER,
)
PARTITIONS_UNUSABLE = Entry(
    "PARTITIONS_UNUSABLE",
    Severity.ERROR,
    "Parts of Plumbline's ranks that do not make whole tensors",
    "nothing can be gathered from them",
    "copy the files of every rank again, or train again from the last checkpoint",
)
