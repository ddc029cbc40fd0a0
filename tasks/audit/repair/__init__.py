"""Repair checkpoints without loss, as a new artifact: `repaired = repair(folder, out)`.

draft         the content of the repaired folder, checked before anything is written
keys          renames tensors: removes wrapper prefixes
ties          drops a tied copy of the embedding, or unties it
documents     edits JSON files: EOS ids, labels of a head, settings of the base
drafting      makes a draft; `would_mend` tells from headers if a repair helps
writing       writes the draft, checks it again, publishes it by one rename
"""

from tasks.audit.repair.drafting import would_mend as would_mend
from tasks.audit.repair.writing import Repaired as Repaired
from tasks.audit.repair.writing import repair as repair
