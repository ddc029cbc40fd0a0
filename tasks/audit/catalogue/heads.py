"""Findings about reward and value heads."""

from __future__ import annotations

from tasks.audit.finding import Section, error, info, warning


class Heads(Section, heading="Heads for rewards and values"):
    HEAD_MISSING = error(
        "A reward or value model without its head",
        "transformers initialises a random head and warns; LLaMA-Factory says `Reward model is "
        "not correctly loaded`; the scores are noise",
        "a head that was never saved cannot be recovered: train again and save it in full "
        "(modules_to_save); if DeepSpeed's shards are still there, they contain it",
        "LLaMA-Factory #7706, LLaMA-Factory #1411, LLaMA-Factory #1024, LLaMA-Factory #5939, "
        "OpenRLHF #209, OpenRLHF #180, OpenRLHF #873",
    )
    HEAD_BASE_LOST = error(
        "LoRA on a head whose own weight was never saved",
        "`size mismatch for score.lora_B` with two labels, random scores with one: the head that "
        "the LoRA was trained on was random, and is gone",
        "train again with the head in modules_to_save",
        "OpenRLHF #682, OpenRLHF #872, OpenRLHF PR #1342",
    )
    HEAD_OF_CRITIC = error(
        "A critic: a model that gives every token a value",
        "no server has a class for it; loaded as a reward model it scores a text by the value of "
        "its last token, which looks like a reward",
        "serve the policy that was trained with it; a critic is only useful to continue training",
    )
    HEAD_LABELS = error(
        "The head's rows and the number of labels in config.json disagree",
        "transformers assumes two labels if num_labels is not set: `size mismatch for "
        "score.weight: [1, hidden] vs [2, hidden]`, or a new random head",
        'set "num_labels": 1 in config.json, or convert it: python flows/deliver.py source=DIR '
        "out=<folder>",
        "OpenRLHF #1039, OpenRLHF #872, OpenRLHF #542, OpenRLHF #428, OpenRLHF #494",
    )
    HEAD_TWO_LABELS = warning(
        "A head with two labels",
        "correct for a classifier of two classes; in a reward model it is the random head that a "
        "loader creates without num_labels=1",
        "if it should be a reward model: the head was lost, train again",
        "OpenRLHF #1039",
    )
    HEAD_PREFIX = error(
        "config.json names another head than the saved one",
        "OpenRLHF loads a new random head under the name of value_head_prefix, without an error",
        "set value_head_prefix to the name in the weights",
        "OpenRLHF PR #1342",
    )
    HEAD_UNUSABLE = error(
        "An unusable head: empty, stored twice, or of a wrong size",
        "loaders stop at its shape, or read the wrong one",
        "save the head again, once and in full",
        "OpenRLHF #682",
    )
    HEAD_IN_MODEL = error(
        "A value head among the language model's tensors",
        "`There is no module or parameter named 'v_head'` in vLLM; transformers ignores it; tools "
        "that look for it in another file say `no v_head weight is found`",
        "split it off: python flows/audit.py source=DIR fix=true out_dir=<folder>",
        "LLaMA-Factory #7511, LLaMA-Factory #4379",
    )
    HEAD_SIDE_FILE = warning(
        "A head in a file beside the weights",
        "transformers and TRL do not read it: `no v_head weight is found`, and training continues "
        "with a random head; vLLM loads the file into the model if there is no index",
        "move it to a subfolder: python flows/audit.py source=DIR fix=true out_dir=<folder>",
        "LLaMA-Factory #4379, LLaMA-Factory #8635",
    )
    HEAD_NORMALISATION = warning(
        "Mean and std of rewards only in config.json",
        "OpenRLHF keeps them in buffers that are not saved and that transformers 5 leaves "
        "uninitialised when it loads: normalised rewards off by orders of magnitude",
        "normalise with the numbers in config.json: (score - mean) / std; vLLM: "
        "PoolerConfig(logit_mean=mean, logit_sigma=std)",
        "OpenRLHF PR #1343",
    )
    HEAD_NOT_NORMALISED = info(
        "An OpenRLHF reward model without mean and std",
        "with normalize_reward OpenRLHF then silently uses 0 and 1",
        "evaluate it once in OpenRLHF, which writes them into config.json",
        "OpenRLHF #693, OpenRLHF #224",
    )
    HEAD_MEAN_STD = error(
        "Invalid mean or std of rewards",
        "a reward is divided by zero, or normalised with only one of the two",
        "evaluate the model again, which writes both",
    )
