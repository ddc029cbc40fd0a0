"""Heads for rewards and values"""

from __future__ import annotations

from tasks.audit.catalogue.entry import Entry
from tasks.audit.finding import Severity

HEAD_MISSING = Entry(
    "HEAD_MISSING",
    Severity.ERROR,
    "A reward or value model without its head",
    "transformers makes a random head up and warns; LLaMA-Factory says `Reward model is not "
    "correctly loaded`; scores are noise that looks like scores",
    "a head that was never saved cannot be recovered: train again with it saved whole "
    "(modules_to_save); where DeepSpeed's shards are still there, they hold it",
    (
        "LLaMA-Factory #7706", "LLaMA-Factory #1411", "LLaMA-Factory #1024", "LLaMA-Factory #5939",
        "OpenRLHF #209", "OpenRLHF #180", "OpenRLHF #873",
    ),
)  # fmt: skip
HEAD_BASE_LOST = Entry(
    "HEAD_BASE_LOST",
    Severity.ERROR,
    "LoRA on a head whose own weight was never saved",
    "`size mismatch for score.lora_B` with two labels, random scores with one: the head that the "
    "LoRA was trained on was random, and is gone",
    "train again with the head in modules_to_save",
    ("OpenRLHF #682", "OpenRLHF #872", "OpenRLHF PR #1342"),
)
HEAD_OF_CRITIC = Entry(
    "HEAD_OF_CRITIC",
    Severity.ERROR,
    "A critic: a model that gives every token a value",
    "no server has a class for it; taken for a reward model it scores a text by the value of its "
    "last token, which looks like a reward",
    "serve the policy that was trained beside it; a critic is of use to go on training alone",
)
HEAD_LABELS = Entry(
    "HEAD_LABELS",
    Severity.ERROR,
    "The head's rows are not the number of labels that config.json gives",
    "transformers takes two labels where num_labels is not given: `size mismatch for score.weight: "
    "[1, hidden] vs [2, hidden]`, or a new random head",
    'give config.json one label: "num_labels": 1, or convert it: python flows/deliver.py '
    "source=DIR out=<folder>",
    ("OpenRLHF #1039", "OpenRLHF #872", "OpenRLHF #542", "OpenRLHF #428", "OpenRLHF #494"),
)
HEAD_TWO_LABELS = Entry(
    "HEAD_TWO_LABELS",
    Severity.WARNING,
    "A head with two labels",
    "right for a classifier of two classes; for a reward model it is the random head that a loader "
    "makes up when nobody tells it num_labels=1",
    "where it is meant to be a reward model: the head was lost, train again",
    ("OpenRLHF #1039",),
)
HEAD_PREFIX = Entry(
    "HEAD_PREFIX",
    Severity.ERROR,
    "config.json names a head that is not the one that was saved",
    "OpenRLHF loads a new random head under the name of value_head_prefix, without an error",
    "set value_head_prefix to the name that is in the weights",
    ("OpenRLHF PR #1342",),
)
HEAD_UNUSABLE = Entry(
    "HEAD_UNUSABLE",
    Severity.ERROR,
    "A head that cannot be one: empty, twice, or of a wrong size",
    "loaders stop at its shape, or take the other one",
    "save the head again, whole and once",
    ("OpenRLHF #682",),
)
HEAD_IN_MODEL = Entry(
    "HEAD_IN_MODEL",
    Severity.ERROR,
    "A value head among the language model's tensors",
    "`There is no module or parameter named 'v_head'` in vLLM; transformers ignores it, and "
    "`no v_head weight is found` in whoever looks for it elsewhere",
    "python flows/audit.py source=DIR fix=true out_dir=<folder> splits it off",
    ("LLaMA-Factory #7511", "LLaMA-Factory #4379"),
)
HEAD_SIDE_FILE = Entry(
    "HEAD_SIDE_FILE",
    Severity.WARNING,
    "A head in a file beside the weights",
    "transformers and TRL do not look there: `no v_head weight is found`, and training goes on "
    "with a random head; vLLM streams the file into the model where there is no index",
    "python flows/audit.py source=DIR fix=true out_dir=<folder> keeps it apart from what is served",
    ("LLaMA-Factory #4379", "LLaMA-Factory #8635"),
)
HEAD_NORMALISATION = Entry(
    "HEAD_NORMALISATION",
    Severity.WARNING,
    "Mean and std of rewards stand in config.json alone",
    "OpenRLHF keeps them in buffers that are not saved and that transformers 5 leaves "
    "uninitialised when it loads: normalised rewards off by orders of magnitude",
    "normalise by the numbers in config.json: (score - mean) / std; vLLM: "
    "PoolerConfig(logit_mean=mean, logit_sigma=std)",
    ("OpenRLHF PR #1343",),
)
HEAD_NOT_NORMALISED = Entry(
    "HEAD_NOT_NORMALISED",
    Severity.INFO,
    "An OpenRLHF reward model without mean and std",
    "with normalize_reward OpenRLHF then silently takes 0 and 1",
    "evaluate it once in OpenRLHF, which writes them into config.json",
    ("OpenRLHF #693", "OpenRLHF #224"),
)
HEAD_MEAN_STD = Entry(
    "HEAD_MEAN_STD",
    Severity.ERROR,
    "Mean and std that cannot be used",
    "a reward divided by zero, or normalised by half of the pair",
    "evaluate the model again, which writes both",
)
