"""Headers, names and shapes"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

BAD_HEADER = Entry(
    "BAD_HEADER",
    Severity.ERROR,
    "A weight file that is cut short, damaged, or no weight file",
    "`SafetensorError: InvalidHeaderDeserialization` or `MetadataIncompleteBuffer` in whatever "
    "opens it; a save or a copy that broke off looks like this",
    "copy or save the file again",
    ("LLaMA-Factory #1910",),
)
NOT_WEIGHTS_YET = Entry(
    "NOT_WEIGHTS_YET",
    Severity.ERROR,
    "A pointer of Git LFS in the place of the weights",
    "`InvalidHeaderDeserialization` in whatever opens it: the repository was cloned without LFS",
    "git lfs pull",
)
NO_TENSORS = Entry(
    "NO_TENSORS",
    Severity.ERROR,
    "A weight file without a single tensor: the 40-byte adapter",
    "peft loads it with a warning and the adapter does nothing; ZeRO-3 or FSDP saved what one rank "
    "held of the trained parameters, which was nothing",
    "save again with the parameters gathered; where DeepSpeed's shards are still there, gather "
    "those: python flows/deliver.py source=<the checkpoint> base=<the base> out=DIR",
    ("peft #1443", "peft #2500", "peft #453", "trl #4416", "Flow-Factory #156"),
)
EMPTY_TENSOR = Entry(
    "EMPTY_TENSOR",
    Severity.ERROR,
    "A tensor without elements where there has to be a matrix",
    "`size mismatch ... copying a param with shape torch.Size([0])` in peft and transformers, a "
    "bare `IndexError: tuple index out of range` in vLLM; ZeRO-3 saved its placeholder",
    "the values are not in this file and cannot be invented; where DeepSpeed's shards are still "
    "there, gather those: python flows/deliver.py source=<the checkpoint> base=<the base> out=DIR",
    (
        "OpenRLHF #651", "OpenRLHF #682", "OpenRLHF #920", "LLaMA-Factory #7665", "peft #2450",
        "peft #1443", "peft #2500", "peft #453", "trl #4416",
    ),
)  # fmt: skip
NOT_CONTIGUOUS = Entry(
    "NOT_CONTIGUOUS",
    Severity.WARNING,
    "A .bin file with tensors whose elements do not lie in order",
    "torch loads them; converters to safetensors refuse them, and merging here does too",
    "save it again as {name: tensor.contiguous() for ...}",
)
NESTED_STATE_DICT = Entry(
    "NESTED_STATE_DICT",
    Severity.ERROR,
    "A trainer's checkpoint under the name of a model's weights",
    "transformers and vLLM look for tensors at the top of the file and find none: every weight is "
    "initialised at random, with a warning",
    "save the inner dictionary alone",
)
NO_TENSOR_ENTRY = Entry(
    "NO_TENSOR_ENTRY",
    Severity.WARNING,
    "A .bin file with entries that are no tensors",
    "`torch.load(weights_only=True)` refuses classes it does not know; loaders take each entry for "
    "a tensor",
    "save model.state_dict() alone",
)
TENSOR_MISSING = Entry(
    "TENSOR_MISSING",
    Severity.ERROR,
    "Tensors that the model's class has and the files do not hold",
    "transformers initialises them at random with a warning; vLLM stops with `Following weights "
    "were not initialized from checkpoint`",
    "take them from the base where training did not change them; else save again",
    ("OpenRLHF #1232", "OpenRLHF #180", "OpenRLHF #209", "Megatron-Bridge #4107"),
)
TENSOR_UNEXPECTED = Entry(
    "TENSOR_UNEXPECTED",
    Severity.WARNING,
    "Tensors that the model's class does not have",
    "transformers ignores them, vLLM stops: `There is no module or parameter named ...`",
    "remove them, or name the class they belong to in config.json",
    ("unsloth #1770",),
)
SHAPE_MISMATCH = Entry(
    "SHAPE_MISMATCH",
    Severity.ERROR,
    "Tensors of another shape than config.json says",
    "`size mismatch for ...` in transformers, an assertion in vLLM's weight loader",
    "take the config.json that was saved with the weights",
    ("OpenRLHF #682", "LLaMA-Factory #3125"),
)
CONTRACT_UNKNOWN = Entry(
    "CONTRACT_UNKNOWN",
    Severity.WARNING,
    "transformers makes no model of config.json, so names and shapes were compared with nothing",
    "`AutoModel.from_pretrained` fails the same way; vLLM may have a class of its own",
    "install the transformers that the model was saved with, or mend config.json",
)
