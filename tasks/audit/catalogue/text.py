"""Findings about embeddings, special tokens and chat templates."""

from __future__ import annotations

from tasks.audit.finding import Section, error, info, warning


class Vocabulary(Section, heading="Embeddings, ties and vocabulary"):
    TIED_HEAD_ON_DISK = warning(
        "An output embedding on disk although config.json ties it",
        "older vLLM fails with KeyError 'lm_head.weight', first seen with Gemma; newer versions "
        "skip it: a head that was trained separately is silently lost",
        "if the two are equal remove it; if they differ set tie_word_embeddings to false: "
        "values=true compares them",
        "LLaMA-Factory #2789, vLLM #3323, vLLM PR #6758, transformers #45127",
    )
    HEAD_NOT_ON_DISK = error(
        "No output embedding although config.json does not tie it",
        "transformers initialises lm_head at random with a warning, vLLM refuses: 'Following "
        "weights were not initialized'",
        "set tie_word_embeddings to true if the model was tied, else save it again with its head",
        "TinyLLaVA #88, OpenRLHF #180",
    )
    VOCAB_SIZE = error(
        "A vocab_size that differs from the number of rows",
        "transformers refuses with 'size mismatch', vLLM with an assertion in its embedding loader",
        "set vocab_size in config.json to the number of rows",
        "LLaMA-Factory #3125, OpenRLHF #87",
    )
    HEAD_ROWS = error(
        "Input and output embedding of different sizes",
        "only one of them was saved after the vocabulary changed: no loader accepts both",
        "save both embeddings again after resize_token_embeddings",
        "LLaMA-Factory #10186, LLaMA-Factory #3154",
    )
    TOKENIZER_ROWS = error(
        "Tokens without a row in the embedding",
        "a text with such a token indexes past the embedding: an IndexError on a CPU, an "
        "assertion that ends the process on a GPU, garbage in some kernels",
        "resize the embedding to the tokenizer, or serve the base's tokenizer",
        "OpenRLHF #87, OpenRLHF PR #163",
    )


class SpecialTokens(Section, heading="Special tokens and EOS"):
    EOS_DISAGREES = error(
        "Generation does not stop at the tokenizer's EOS token",
        "the model was trained to end with the tokenizer's EOS but generate() does not stop "
        "there: it continues to the length limit and talks to itself",
        "add the tokenizer's id to eos_token_id of generation_config.json: python flows/audit.py "
        "source=DIR fix=true out_dir=<folder>",
        "LLaMA-Factory PR #10834, LLaMA-Factory #9338, LLaMA-Factory #2075",
    )
    EOS_CONFIGS_DIFFER = warning(
        "config.json and generation_config.json stop at different tokens",
        "engines that read only config.json stop at other tokens than generate() and vLLM",
        "write the same eos_token_id into both",
        "LLaMA-Factory #9338",
    )
    EOS_NOT_TEMPLATE_END = warning(
        "The chat template ends turns with a token that does not stop generation",
        "responses contain that token and continue: '<|im_end|>' against '<|endoftext|>'",
        "add its id to eos_token_id of generation_config.json",
        "LLaMA-Factory #3594, LLaMA-Factory #7943, LLaMA-Factory #2884, LLaMA-Factory #1727, "
        "verl #1246, EasyR1 PR #11007",
    )
    EOS_MISSING = warning(
        "No EOS token in any file",
        "every generation runs to its length limit",
        "set eos_token in tokenizer_config.json and eos_token_id in generation_config.json",
        "LLaMA-Factory #2075",
    )
    TOKEN_UNKNOWN = error(
        "A special token that the tokenizer does not have",
        "it has no id: loading adds it as a new token beyond the embedding, or maps it to the "
        "unknown token",
        "use a token of tokenizer.json, or add it and resize the embedding",
        "OpenRLHF #87, OpenRLHF #645",
    )
    TOKEN_ID_RANGE = error(
        "A token id beyond the embedding",
        "padding or starting with it indexes past the embedding; as EOS it is never generated",
        "set the id to a token of the tokenizer",
        "OpenRLHF #87",
    )
    SPECIAL_TOKENS_EMPTY = warning(
        "A tokenizer without special tokens",
        "an exporter dropped them: vLLM has no EOS to stop at, padding fails",
        "copy special_tokens_map.json and tokenizer_config.json from the trained model",
        "LLaMA-Factory #2075",
    )
    PAD_MISSING = warning(
        "A classifier or reward model without pad_token_id",
        "transformers refuses batches of more than one text: 'Cannot handle batch sizes > 1 if no "
        "padding token is defined'",
        "set pad_token_id in config.json to the tokenizer's",
    )
    GENERATION_CONFIG_MISSING = info(
        "No generation_config.json",
        "the base's sampling defaults and EOS tokens are lost: verl's Megatron merger drops it",
        "copy generation_config.json from the base, with the trained tokenizer's EOS",
        "verl #7198",
    )
    TOKENIZER_MISSING = warning(
        "No tokenizer",
        "vLLM does not start on the folder; with the base's tokenizer, tokens and template that "
        "were added in training are lost",
        "save the tokenizer of the training run into the folder",
    )


class TokenIds(Section, heading="Token ids"):
    TOKENIZER_MISREAD = error(
        "A tokenizer class that reads tokenizer.json wrongly",
        "transformers 5, and vLLM with it, rebuilds the pipeline of this class and takes only the "
        "vocabulary from tokenizer.json: texts become other ids than in training, DeepSeek's "
        "models lose all blanks, and nothing says so",
        "name PreTrainedTokenizerFast, which reads the file as it is: python flows/audit.py "
        "source=DIR fix=true out_dir=<folder>",
        "transformers #45488, transformers #48206, vLLM PR #48482, TensorRT-LLM PR #13924, "
        "open-instruct #1896",
    )
    TOKENIZER_NOT_OF_BASE = error(
        "A tokenizer that splits or numbers texts otherwise than the base's",
        "the embedding's rows were trained for the base's ids: another vocabulary, merges, "
        "normalizer, pre-tokenizer or decoder gives the model texts that it does not know",
        "copy tokenizer.json of the base, with the tokens that training added; or give the base "
        "that the tokenizer belongs to",
        "transformers #45488",
    )


class Templates(Section, heading="Chat templates"):
    TEMPLATE_MARK = error(
        "A chat template with a byte-order mark",
        "every prompt has U+FEFF, mostly at its beginning, which no training prompt had",
        "save the template without it: python flows/audit.py source=DIR fix=true out_dir=<folder>",
    )
    TEMPLATE_MISSING = warning(
        "No chat template",
        "vLLM's chat endpoint and apply_chat_template refuse: 'default chat template is no longer "
        "allowed'; a template chosen by hand may differ from that of training",
        "save the template of the training run as chat_template.jinja",
        "LLaMA-Factory #10396, OpenRLHF #1069",
    )
    TEMPLATES_DIFFER = error(
        "Different chat templates in one folder",
        "transformers, processors and vLLM read different files: one chat becomes different tokens",
        "keep only the template of training, in chat_template.jinja",
        "LLaMA-Factory #5489, OpenRLHF #1069",
    )
    TEMPLATE_BROKEN = error(
        "A chat template that does not parse",
        "every chat request fails with a TemplateSyntaxError",
        "save the template of the training run again",
    )
    TEMPLATE_UNBOUNDED = error(
        "A chat template that takes more time or memory than any that serves a model",
        "every chat request stops the server: nested loops run for hours, a repeated text takes "
        "all memory",
        "save the template of the training run again, or copy that of the base",
    )
    TEMPLATE_UNKNOWN_TOKENS = warning(
        "Markers in the template that are not tokens",
        "the tokenizer splits them into pieces: the model sees text that it was not trained on, "
        "and never generates an end-of-turn token",
        "serve the tokenizer of the training run, or add the tokens and resize the embedding",
        "OpenRLHF #645, OpenRLHF PR #648, OpenRLHF #1069",
    )
    TEMPLATE_NOT_OF_BASE = info(
        "Another chat template than the base's",
        "intended if training had its own template; otherwise the reason why an API that uses the "
        "base's template gives better responses than the merged model",
        "compare it with the template of the training run",
        "LLaMA-Factory #10596, OpenRLHF #1069",
    )
