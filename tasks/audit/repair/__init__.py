"""Repair checkpoints without loss, as a new artifact: `repaired = repair(folder, out)`.

draft         the content of the repaired folder, checked before anything is written
documents     edits JSON files: EOS ids, tokenizer class, settings of the base
drafting      makes a draft: splits off a head, removes wrapper prefixes, edits JSON files
writing       drops or unties tied embeddings, writes the draft, checks it, publishes it
"""

from tasks.audit.repair.drafting import is_repairable as is_repairable
from tasks.audit.repair.writing import Repaired as Repaired
from tasks.audit.repair.writing import repair as repair
