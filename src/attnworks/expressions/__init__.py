"""User-written masks and scores, traced once into expressions: evaluated by torch, printed for Triton and CUDA.

``tracing.trace`` calls the function with stand-ins (``proxies``) that write an ``Expression`` (``graph``);
``evaluation.evaluate`` computes it, ``derivatives.derivative`` differentiates it, ``source.to_source`` prints it. Only
the graph is imported with the package: most programs never trace anything.
"""

from attnworks.expressions.graph import Expression, NotTraced, OperandSpec, in_memory, kernel_operand, operand_spec

__all__ = ["Expression", "NotTraced", "OperandSpec", "in_memory", "kernel_operand", "operand_spec"]
