"""Masks of one's own for ``attnworks traffic`` and ``attnworks flow``: which tiles they hide, and what that saves.

attnworks traffic --mask examples/own_mask.py:DOCUMENTS --causal --seq 8192 --schedule triton --machine h200-sxm
attnworks flow --mask examples/own_mask.py:BLOCKS --seq 2048 --out blocks.html
"""

import torch

LONGEST = 16384

_document = torch.arange(LONGEST) // 700  # the document that each token belongs to
_kept = torch.rand(LONGEST // 128, LONGEST // 128, generator=torch.Generator().manual_seed(0)) < 0.2


def DOCUMENTS(b, h, q, k):
    """Tokens see their own document; with --causal what came before them there."""
    return _document[q] == _document[k]


def PREFIX(b, h, q, k):
    """The first 256 tokens see each other, later ones everything before them."""
    return (k <= q) | (k < 256)


def BLOCKS(b, h, q, k):
    """Block-sparse: a fifth of all blocks of 128 x 128, and those on the diagonal."""
    return _kept[q // 128, k // 128] | (q // 128 == k // 128)
