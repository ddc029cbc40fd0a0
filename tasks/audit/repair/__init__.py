"""Repairs that lose nothing, as a new artifact: `repaired = repair(source, out)`.

draft       what the repaired folder would hold; looked at by the same families before a byte moves
keys        names without residue
ties        one embedding, or two
documents   what ends a text, how many labels a head has
drafting    all of these but ties, which take data: is it worth a repair
writing     the draft as files, checked once more, published by one rename
"""

from tasks.audit.repair.drafting import would_mend as would_mend
from tasks.audit.repair.writing import Repaired as Repaired
from tasks.audit.repair.writing import repair as repair
