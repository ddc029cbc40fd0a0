"""`WitnessCallback`: a record of the live model in every checkpoint of Hugging Face's Trainer.

    trainer = SFTTrainer(..., callbacks=[WitnessCallback()])

Everything that is built on the Trainer calls it: TRL, LLaMA-Factory, ms-swift, axolotl, unsloth. It
never ends a training: what goes wrong is logged, and the checkpoint has no record.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from .prints import FOLDER
from .probes import first_rows
from .record import witness

log = logging.getLogger("plumbline.witness")

PROMPTS, ROWS = "PLUMBLINE_WITNESS_PROMPTS", "PLUMBLINE_WITNESS_ROWS"
"""Environment variables: a text file with one prompt a line; number of training rows."""


class WitnessCallback(TrainerCallback):
    """Write `plumbline.witness` into every checkpoint, and into the output folder at the end.

    Args:
        prompts: texts of one's own to measure; None for the file in PLUMBLINE_WITNESS_PROMPTS.
        rows: number of training examples to measure, by default PLUMBLINE_WITNESS_ROWS or 4. Only
            their first 64 token ids are recorded, no text.
    """

    def __init__(self, prompts: Sequence[str] | None = None, rows: int | None = None) -> None:
        self._prompts = prompts
        self._rows = int(os.environ.get(ROWS, "4")) if rows is None else rows
        self._last: int | None = None  # step of the last record

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the model that has just been saved. Called on every rank."""
        self._take(Path(args.output_dir) / f"checkpoint-{state.global_step}", state, kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the final model in the output folder, where `save_model` puts it."""
        out = Path(args.output_dir)
        # The best model, if that was loaded at the end, is another one than the last.
        if self._last == state.global_step and state.best_model_checkpoint is None:
            if state.is_world_process_zero:
                record = out / f"checkpoint-{self._last}" / FOLDER
                try:
                    shutil.rmtree(out / FOLDER, ignore_errors=True)
                    shutil.copytree(record, out / FOLDER)
                except OSError as error:  # a record is never worth a training
                    log.warning("no plumbline.witness in %s: %s", out, error)
            return
        self._take(out, state, kwargs)

    def _take(self, folder: Path, state: Any, kwargs: Any) -> None:
        tokenizer = kwargs.get("processing_class") or kwargs.get("tokenizer")
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor for images
        if tokenizer is None:
            log.warning("no plumbline.witness: the trainer has no tokenizer")
            return
        dataset = getattr(kwargs.get("train_dataloader"), "dataset", None)
        prompts, path = self._prompts, os.environ.get(PROMPTS)
        try:
            if prompts is None:
                text = Path(path).read_text(encoding="utf-8") if path else ""
                prompts = [line for line in text.splitlines() if line]
            record = witness(
                kwargs["model"],
                tokenizer,
                folder,
                prompts=prompts,
                rows=first_rows(dataset, self._rows),
                facts={"step": state.global_step},
            )
        except Exception as error:  # a record is never worth a training
            log.warning("no plumbline.witness in %s: %s: %s", folder, type(error).__name__, error)
            return
        self._last = state.global_step
        if getattr(state, "is_world_process_zero", True):
            print(f"plumbline: recorded what the model computes: {record}", file=sys.stderr)


def register(trainer: Any) -> None:
    """Add the callback to every Trainer that this process makes, unless it has one already.

    `DEFAULT_CALLBACKS` of the module would do without a wrapper, but ms-swift replaces that list.
    """
    made = trainer.Trainer.__init__

    @functools.wraps(made)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        if not any(isinstance(each, WitnessCallback) for each in self.callback_handler.callbacks):
            self.add_callback(WitnessCallback)

    trainer.Trainer.__init__ = __init__
