"""User-written masks and scores as Triton functions, which a kernel takes as ``tl.constexpr`` arguments and inlines.

The printed text is registered with ``linecache``, where Triton (through ``inspect``) and tracebacks find it. Triton's
cache on disk goes by the text, so a later process that prints the same finds what this one compiled.
"""

from __future__ import annotations

import hashlib
import linecache
from functools import lru_cache
from typing import Any, Literal

import triton
import triton.language as tl

from attnworks.expressions import Expression
from attnworks.expressions.source import PRELUDES, to_source

Kind = Literal["mask", "score"]


@lru_cache(maxsize=1024)
def jit(expression: Expression, kind: Kind) -> Any:
    """The expression as a ``triton.JITFunction``, one for each expression.

    "mask": ``(b, h, q, k, shift, operands)`` gives an int1 block; "score": ``(s, b, h, q, k, shift, operands)`` a float
    block, in the precision of s. b, h, q, k, shift: int32 tensors or scalars (no constexpr) that broadcast against each
    other; the result has the shape that they, as far as the expression reads them, broadcast to. ``operands``: a tuple
    of pointers to the captured tensors and then their ``operand_facts``. Lanes outside the problem may be evaluated:
    nothing outside a captured tensor is read. The derivative of a score is a "score". Raises ``ValueError`` if the
    expression is not of the kind.
    """
    if (expression.kind == "bool") != (kind == "mask"):
        raise ValueError(f"kind: was {kind!r}, but the expression is {expression.kind}")
    # The name must be the expression's own: a kernel is compiled with one function for each name and argument types.
    name = f"{kind}_{hashlib.sha256(to_source(expression, 'triton', kind).encode()).hexdigest()[:16]}"
    space: dict[str, Any] = {"tl": tl, "triton": triton, "__name__": __name__}
    _run(PRELUDES["triton"], space)
    _run(f"@triton.jit\n{to_source(expression, 'triton', name)}", space)
    return space[name]


def _run(text: str, space: dict[str, Any]) -> None:
    """Execute text whose source ``inspect`` can find."""
    name = f"<attnworks {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), space)
