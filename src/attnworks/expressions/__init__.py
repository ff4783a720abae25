"""User-written masks and scores, traced once into expressions: evaluated by torch, printed for Triton and CUDA.

``trace`` calls the function with stand-ins (``proxies``) that write an ``Expression`` (``graph``); ``evaluate``
computes it, ``derivatives.derivative`` differentiates it, ``source.to_source`` prints it.
"""

from attnworks.expressions.evaluation import evaluate
from attnworks.expressions.graph import Expression, NotTraced, OperandSpec, operand_spec
from attnworks.expressions.tracing import MASK_INPUTS, SCORE_INPUTS, Traced, trace

__all__ = [
    "MASK_INPUTS",
    "SCORE_INPUTS",
    "Expression",
    "NotTraced",
    "OperandSpec",
    "Traced",
    "evaluate",
    "operand_spec",
    "trace",
]
