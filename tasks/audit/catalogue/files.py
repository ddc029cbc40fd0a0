"""Findings about the folder, its files and the code in them."""

from __future__ import annotations

from tasks.audit.finding import Section, error, info, warning


class Folders(Section, heading="The folder and its documents"):
    NOTHING_HERE = error(
        "The folder holds no model, adapter or checkpoint of a known kind",
        "transformers, peft and vLLM find no configuration and no weights in it",
        "pass the folder that holds config.json or adapter_config.json",
        "unsloth #1191, LLaMA-Factory #4896",
    )
    MIXTURE = error(
        "A full model and an adapter in one folder",
        "vLLM picks weights by pattern: without an index it streams the adapter into the model "
        "and fails with `There is no module or parameter named 'base_model'`; peft and "
        "transformers each load one of the two",
        "move adapter_config.json and adapter_model.* into a folder of their own",
        "LLaMA-Factory #7511, LLaMA-Factory #4896",
    )
    CONFIG_MISSING = error(
        "Weights without a configuration file",
        "transformers, peft and vLLM refuse the folder before they read a tensor",
        "copy the configuration from the trainer's output, or from the base for a full model",
        "unsloth #1191",
    )
    JSON_UNREADABLE = error(
        "A file that every loader reads is not a JSON object, or too large to be one",
        "transformers and vLLM stop with a JSONDecodeError; an interrupted copy looks like this",
        "copy the file again from its origin",
    )
    JSON_KEY_TWICE = warning(
        "A key twice in one object of a JSON file",
        "loaders keep the last value without a word; whoever reads the file may see the first",
        "delete the line with the value that is not meant",
    )
    ODD_ENTRY = warning(
        "A broken link, a link to a folder, or folders nested too deep among the files",
        "a loader that opens it fails; the audit did not open it",
        "replace it with a regular file, or remove it",
    )
    LINK_OUTSIDE = error(
        "A link that leads out of the folder and of its hub cache",
        "whoever made the link chose a file of this machine, which could hold a secret; it would "
        "be read, and published with the model",
        "remove it, or copy what it leads to: `cp -rL FOLDER NEW`",
    )
    SPECIAL_FILE = error(
        "A pipe, a socket or a device among the files",
        "a loader that opens it waits for ever or reads without end; the audit did not open it",
        "replace it with a regular file, or remove it",
    )
    LISTING_CUT = error(
        "More files than any checkpoint has; the audit did not look at the rest",
        "the files beyond the limit were not checked",
        "pass the folder of the checkpoint itself",
    )
    CANNOT_JUDGE = error(
        "A check failed: a file has content that no known tool writes",
        "loaders read the same files with less care",
        "look at the file that the message names; report a bug if a tool wrote it like this",
    )
    FOREIGN_FORMAT = error(
        "A checkpoint that transformers, peft and vLLM do not load as it is",
        "they need safetensors or .bin files beside config.json; this is a trainer's own layout, "
        "a raw state dict or another runtime's format",
        "convert it with the tool that wrote it",
        "vLLM #2386, verl #1679, verl #2262",
    )
    LORA_BESIDE_MODEL = warning(
        "An adapter in a subfolder, beside weights that may not include it",
        "verl's merger writes the base's weights as the merged model and puts the trained part "
        "into lora_adapter/: the weights alone are the model that training started from",
        "python flows/audit.py source=<folder>/lora_adapter, then python flows/deliver.py "
        "source=<folder>/lora_adapter base=<the base> out=DIR",
        "verl #7285, verl #4553, verl #3087",
    )
    MANIFEST_DIFFERS = error(
        "A Plumbline artifact whose files differ from its manifest",
        "the files are not those that were checked and measured: one was added, removed or changed",
        "make the artifact again, or restore it from its origin",
    )
    SIGNATURE_MISSING = error(
        "No signature, though a key to check it was given",
        "nothing shows who made the model, and every file of it may have been changed",
        "get the signed folder, or sign it: register.sign=<private key> of rlhf.py or deliver.py",
    )
    SIGNATURE_UNREADABLE = error(
        "A signature that is not one of OpenSSF Model Signing",
        "it cannot be checked, so every file of the model may have been changed",
        "restore model.sig from its origin; or remove it, and sign the folder again",
    )
    SIGNED_BY_ANOTHER = error(
        "A signature that was not made with the given key",
        "somebody else signed the model, or changed what the signature says",
        "check it with the key of the maker, if you trust that: verify=<public key>",
    )
    SIGNED_CHANGED = error(
        "A file with other bytes than those that were signed",
        "the model is not the one that was tested and signed",
        "restore the file from its origin",
    )
    SIGNED_REMOVED = error(
        "A file that was signed and is not there",
        "the model is not the one that was tested and signed",
        "restore the file from its origin",
    )
    SIGNED_ADDED = error(
        "A file that was not there when the folder was signed, or a link",
        "loaders find weights, code and templates by name: an added file can change the model",
        "remove the file",
    )
    SIGNATURE_UNCHECKED = info(
        "A signature that was not checked, since no key was given",
        "whether the model is the one that was signed is unknown",
        "python flows/audit.py source=DIR verify=<public key>",
    )


class Files(Section, heading="Files and index"):
    WEIGHTS_MISSING = error(
        "A configuration without weights",
        "`no file named model.safetensors` in transformers, `Cannot find any model weights` in "
        "vLLM; the save was interrupted, or hung because a rank was missing",
        "save again; if the trainer's own checkpoint is still there, gather that",
        "LLaMA-Factory #2703, LLaMA-Factory #10410, LLaMA-Factory #10230, LLaMA-Factory #3238, "
        "OpenRLHF #1126, Megatron-Bridge #1883",
    )
    STRAY_WEIGHT_FILE = error(
        "A weight file that is not part of the checkpoint, and that a loader would read",
        "vLLM reads every *.safetensors of a folder without an index, every *.bin of one without "
        "safetensors, and only consolidated*.safetensors if there is one: `There is no module or "
        "parameter named 'v_head' in Qwen3ForCausalLM`",
        "move the file out of the folder, or into a subfolder; or write a copy without it: python "
        "flows/audit.py source=DIR fix=true out_dir=<folder>",
        "LLaMA-Factory #8635, LLaMA-Factory #7511",
    )
    HIDDEN_WEIGHT_FILE = info(
        "Weight files with a leading dot, which no loader reads",
        "macOS writes `._x` beside every file on exFAT, SMB and NFS; transformers and vLLM list "
        "folders without such names",
        "nothing; find DIR -name '._*' -delete removes those of macOS",
        "unsloth #8566, SceneWorks #1333",
    )
    TWO_WEIGHT_SETS = warning(
        "The same weights twice: as safetensors and as .bin",
        "transformers, peft and vLLM read the safetensors, even if the .bin is newer; OpenRLHF's "
        "ZeRO-3 save writes the .bin and, if interrupted, leaves empty safetensors beside it",
        "delete the set that you do not want",
        "OpenRLHF #651",
    )
    INDEX_UNREADABLE = error(
        "The index of the shards cannot be read",
        "transformers and vLLM read it first and stop there",
        "rebuild it: python flows/audit.py source=DIR fix=true out_dir=<folder>",
    )
    INDEX_PATH = error(
        "The index names a path instead of a file in the same folder",
        "a loader that follows it reads files outside the checkpoint",
        "do not load it; ask its author",
    )
    INDEX_MISSING_FILE = error(
        "The index names files that do not exist",
        "`Weight files referenced in index but missing` in vLLM, FileNotFoundError in transformers",
        "copy the files from the origin of the checkpoint",
    )
    INDEX_MISSING_KEY = error(
        "The index names tensors that its files do not contain",
        "transformers initialises them at random with a warning; vLLM stops with `Following "
        "weights were not initialized from checkpoint`",
        "take the index that was written with the files; rebuild it if nothing is missing",
        "transformers #40968, Relax PR #148",
    )
    KEY_NOT_IN_INDEX = error(
        "Tensors that the index does not name",
        "transformers does not load them, vLLM reads whole files and does: two different models",
        "rebuild the index: python flows/audit.py source=DIR fix=true out_dir=<folder>",
    )
    KEY_TWICE = error(
        "A tensor in two files",
        "the loader and the order of the files decide which one is used",
        "remove the file that is left over from an earlier save",
    )
    INDEX_ABSENT = error(
        "Shards without an index",
        "transformers looks for model.safetensors or an index and finds neither",
        "rebuild it: python flows/audit.py source=DIR fix=true out_dir=<folder>",
        "unsloth #1521, unsloth #1122",
    )
    SHARDS_INCOMPLETE = error(
        "The shard names give a total, and some shards are missing",
        "vLLM loads the shards that exist and stops with `not initialized from checkpoint`, or "
        "serves noise",
        "copy the missing files from the origin of the checkpoint",
    )
    DOWNLOAD_INTERRUPTED = error(
        "A download from the Hugging Face Hub that did not finish",
        "the folder looks like a model and lacks files; loaders stop, or load what is there",
        "hf download <owner/name>",
        "Automodel PR #3582, semble #222",
    )
    BLOB_DIFFERS = error(
        "A file of a Hugging Face cache whose hash is not its name",
        "something wrote through the link of the snapshot, or the transfer was corrupted: the "
        "model is not the published one",
        "hf download --force-download <owner/name>",
        "aprender #3971, huggingface_hub #3643",
    )
    STALE_INDEX = warning(
        "A single weight file beside an index that does not name it",
        "transformers loads the single file; vLLM follows the index: two different models, or a "
        "FileNotFoundError",
        "delete the index or the single file, whichever is left over from an earlier save",
        "verl #7193",
    )
    INDEX_TOTAL_SIZE = warning(
        "total_size in the index is not the size of the tensors in bytes",
        "tools that plan memory and downloads rely on it; verl's distributed writer stores the "
        "number of elements there",
        "rebuild the index: python flows/audit.py source=DIR fix=true out_dir=<folder>",
    )


class Unsafe(Section, heading="Files that run code"):
    PICKLE_CALLS = error(
        "A pickle with a call, or a class, that no checkpoint needs; or a Keras Lambda layer",
        "`torch.load` without weights_only=True, and pickle.load, run it with the rights of the "
        "user",
        "do not load it; delete it, and tell its author",
    )
    PICKLED_WEIGHTS = warning(
        "Weights as a pickle",
        "a pickle is a program; vLLM, transformers and peft read it with weights_only=True, older "
        "versions run it. OpenRLHF saves a ZeRO-3 adapter like this",
        "python flows/audit.py source=DIR fix=true out_dir=<folder> writes safetensors",
        "OpenRLHF #651",
    )
    PICKLE_CLASSES = info(
        "A trainer's pickle that contains classes",
        "it loads only with weights_only=False, which runs any code in the file",
        "do not pass it on with the model",
    )
    PICKLE_OPAQUE = error(
        "A file that cannot be scanned for code: damaged, too long, or an archive of another kind",
        "nobody knows what it does when it is loaded",
        "do not load it; unpack an archive and audit the folder, delete any other file",
    )
    REMOTE_CODE = warning(
        "The model contains its own code: auto_map, or Python files",
        "with trust_remote_code=True transformers and vLLM run it; without it they refuse the "
        "model",
        "read the code; if the class is one of transformers' own, remove auto_map",
        "LLaMA-Factory #9346",
    )
