"""Texts to measure a delivery on: the built-in ones, or the lines of a file."""

from __future__ import annotations

from pathlib import Path

from tasks.core.errors import ConfigError, DataError
from tasks.evaluation.scoring import ReferenceScorer

PROBE_TOKENS = 64
"""Maximum number of tokens of a probe, as in training's own fingerprint."""

SHORTEST = 2
"""Minimum number of tokens of a probe: one as context and one to score."""

BUILT_IN = (
    "The capital of France is Paris, and the capital of Italy is",
    "Water boils at 100 degrees Celsius at sea level; on a mountain it boils",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "To be, or not to be, that is the question:",
    "Question: What is 17 times 23?\nAnswer: 17 times 23 is",
    "Dear Sir or Madam,\n\nI am writing to ask about",
    '{"name": "Ada", "born": 1815, "known_for": ["the first',
    "Der Zug nach Hamburg fährt heute von Gleis",
    "La lumière du soleil met environ huit minutes à",
    "Once upon a time there was a small fox who lived at the edge of",
    "SELECT customer_id, SUM(amount) FROM orders GROUP BY",
    "The derivative of sin(x) is cos(x), and the derivative of cos(x) is",
    "Ingredients: two eggs, a cup of flour, a pinch of salt. First, whisk",
    "In 1969 two people walked on the Moon for the first time;",
    "for (int i = 0; i < n; i++) {\n    total += values[i];\n}\nreturn",
    "今日はとても天気がいいので、",
    "El perro corre por el parque mientras la niña",
    "User: How do I reset my password?\nAssistant: Open the settings and",
    "A prime number has exactly two divisors; the first five are 2, 3, 5,",
    "Error: connection refused. The most likely reason is that the server",
    "The opposite of hot is cold, the opposite of tall is",
    "人工智能的发展",
    "Translate to German: Good morning, how are you? ->",
    "Photosynthesis turns light, water and carbon dioxide into",
    "<html>\n<head><title>Example</title></head>\n<body>",
    "She opened the letter, read it twice, and then",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "The three laws of thermodynamics can be summed up as follows:",
    "Привет! Меня зовут",
    "git commit -m 'Fix the off-by-one error in",
    "Because the bridge was closed, the bus had to",
    "In summary, the results show that",
)


def probe_texts(path: str | None, count: int) -> list[str]:
    """Return the first `count` texts of a file, one a line, or of the built-in texts.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if path is None:
        return list(BUILT_IN[:count])
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"smoke.texts={path}: cannot be read: {error}") from error
    texts = [line for line in lines if line.strip()][:count]
    if not texts:
        raise ConfigError(f"smoke.texts={path}: no text in it", hint="smoke.texts=null")
    return texts


def encode_probes(
    scorer: ReferenceScorer, tokenizer: Path, texts: list[str], limit: int
) -> list[list[int]]:
    """Return the token ids of the texts with at least `SHORTEST` tokens.

    Args:
        scorer: the transformers child.
        tokenizer: folder of the tokenizer.
        texts: plain texts.
        limit: maximum number of tokens of a probe.

    Raises:
        DataError: all texts are too short.
    """
    tokens = scorer.encode_texts(tokenizer, texts, limit=limit)
    probes = [ids for ids in tokens if len(ids) >= SHORTEST]
    if not probes:
        raise DataError("no text has two tokens: nothing to measure on", hint="smoke.texts=<file>")
    return probes
