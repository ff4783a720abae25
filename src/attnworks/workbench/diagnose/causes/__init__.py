"""What each known fault looks like, the line of maths it breaks, and where to look: the experience behind ``diagnose``.

``CAUSES`` has an entry for every fault of ``faults.FAULTS``; docs/symptoms.md is this table (``symptoms.py``).
"""

from __future__ import annotations

from attnworks.workbench.diagnose.causes import gradients, masks, memory, scores, softmax
from attnworks.workbench.diagnose.causes.cause import Cause

SECTIONS: dict[str, dict[str, Cause]] = {
    **softmax.SECTIONS,
    **masks.SECTIONS,
    **scores.SECTIONS,
    **memory.SECTIONS,
    **gradients.SECTIONS,
}

CAUSES: dict[str, Cause] = {fault: cause for section in SECTIONS.values() for fault, cause in section.items()}

__all__ = ["CAUSES", "SECTIONS", "Cause"]
