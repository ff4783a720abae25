"""The eighth set, dense, called as flash_attn_func is: which keys a row sees, grids and offsets. Its faults are those
that issue threads of attention libraries tell of most, as simple as they come there. A kernel's first lines say what is
wrong with it and when.

Every kernel of the set is right inside ``third.repaired()``. Written without sight of diagnose's rules, of its mutants
and of what it says about any kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.held_out_kernels.fifth import INF, heads_first, scale_of
from workbench.held_out_kernels.seventh import Running, blank, ends, stored, tiles, visible
from workbench.held_out_kernels.third import broken

# ---- causal ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def loop_without_the_shift(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Under causal a tile of 32 rows goes through keys up to the number of its last row; the comparison inside counts
    from the last query and key, as it must. With more keys than queries the newest are not read."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    out, lse = blank(q, Q, v)
    for rows in tiles(M, 32):
        last = int(rows[-1]) + 1 + (0 if broken() else N - M) if causal else N
        state = Running(Q[:, :, rows], v.shape[-1])
        for keys in tiles(N, 32)[: -(-max(last, 0) // 32)]:
            s = Q[:, :, rows] @ K[:, :, keys].mT * scale_of(q, softmax_scale)
            state.add(s.where(visible(rows, keys, N - M, None, 0 if causal else None), -INF), V[:, :, keys])
        lse[:, :, rows], out[:, :, rows] = state.state
    return stored(q, out, lse, return_softmax_lse)


@torch.no_grad()
def stages_of_unequal_tiles(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Two stages under causal: keys before a row tile's first one go without a mask, those on its diagonal with one.
    Tiles were made 32 keys long and only 16 rows high: where the first stage ends inside of one, that tile's other half
    is read as well, seen by all rows, and once more by the second stage."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    out, lse = blank(q, Q, v)
    for rows in tiles(M, 16):
        state = Running(Q[:, :, rows], v.shape[-1])
        diagonal = min(max(int(rows[0]) + N - M, 0), N) if causal else N
        if causal and not broken():
            diagonal = diagonal // 32 * 32
        ahead = min(max(int(rows[-1]) + N - M + 1, 0), N)
        for first in range(0, diagonal, 32):
            keys = torch.arange(first, min(first + 32, N))
            state.add(Q[:, :, rows] @ K[:, :, keys].mT * scale_of(q, softmax_scale), V[:, :, keys])
        for first in range(diagonal, ahead if causal else diagonal, 32):
            keys = torch.arange(first, min(first + 32, ahead))
            s = Q[:, :, rows] @ K[:, :, keys].mT * scale_of(q, softmax_scale)
            state.add(s.where(visible(rows, keys, N - M, None, 0), -INF), V[:, :, keys])
        lse[:, :, rows], out[:, :, rows] = state.state
    return stored(q, out, lse, return_softmax_lse)


@torch.no_grad()
def offs_m_against_offs_n(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """Causal compares the key's number with the query's, as in a kernel for training, where there are as many of both.
    With other lengths it must count from their ends."""
    (B, M, H, _), (N, G) = q.shape, k.shape[1:3]
    out, lse = q.new_zeros(B, M, H, v.shape[-1]), torch.full((B, H, M), -INF)
    for b in range(B):
        for h in range(H):
            for rows in tiles(M, 64):
                x, state = (
                    q[b, rows, h].float() * scale_of(q, softmax_scale),
                    Running(q[b, rows, h].float(), v.shape[-1]),
                )
                for keys in tiles(N, 32):
                    place = rows[:, None] if broken() else rows[:, None] + N - M
                    s = x @ k[b, keys, h * G // H].float().T
                    state.add(s.masked_fill(keys > place, -INF) if causal else s, v[b, keys, h * G // H].float())
                out[b, rows, h], lse[b, h, rows] = state.out.to(q.dtype), state.lse
    return (out, lse) if return_softmax_lse else out


# ---- windows ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def window_is_one_number(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), return_softmax_lse=False):
    """The wrapper has one window size, the left one, and passes it for both ends. Under causal, and with ends that are
    the same, it is right."""
    M, N, (left, right) = q.shape[1], k.shape[1], ends(window_size, causal)
    if broken() and left is not None and not causal:
        right = left
    Q, K, V = heads_first(q, k, v)
    state = Running(Q, v.shape[-1])
    for keys in tiles(N, 64):
        s = Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)
        state.add(s.where(visible(torch.arange(M), keys, N - M, left, right), -INF), V[:, :, keys])
    return stored(q, state.out, state.lse, return_softmax_lse)


@torch.no_grad()
def range_excludes_its_end(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """A window's right end goes into range(first, last) as it is, and the furthest key ahead is left out. Causal has
    its own bound, which is right."""
    (B, M, H, _), (N, G), (left, right) = q.shape, k.shape[1:3], window_size
    out = q.new_zeros(B, M, H, v.shape[-1])
    K, V = (x.float().repeat_interleave(H // max(G, 1), 2).transpose(1, 2) for x in (k, v))
    for row in range(M):
        place = row + N - M
        first = max(place - left, 0) if left >= 0 else 0
        last = place + right + (0 if broken() else 1) if right >= 0 else N
        keys = torch.arange(first, max(min(place + 1 if causal else last, N), first))
        state = Running(q[:, row].float()[:, :, None], v.shape[-1])
        s = q[:, row].float()[:, :, None] @ K[:, :, keys].mT * scale_of(q, softmax_scale)
        state.add(s, V[:, :, keys])
        out[:, row] = state.out[:, :, 0].to(q.dtype)
    return out


# ---- grid and offsets ------------------------------------------------------------------------------------------------


@torch.no_grad()
def grid_rounded_down(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The grid has seq_q // 64 blocks of rows, at least one: what is left over of more than 64 rows is never computed
    and stays 0."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    out, lse = blank(q, Q, v)
    launched = max(M // 64, 1) if broken() else -(-M // 64)
    for block in range(launched):
        rows = torch.arange(block * 64, min(block * 64 + 64, M))
        state = Running(Q[:, :, rows], v.shape[-1])
        for keys in tiles(N, 48):
            s = Q[:, :, rows] @ K[:, :, keys].mT * scale_of(q, softmax_scale)
            state.add(s.where(visible(rows, keys, N - M, None, 0 if causal else None), -INF), V[:, :, keys])
        lse[:, :, rows], out[:, :, rows] = state.state
    return stored(q, out, lse, return_softmax_lse)


@torch.no_grad()
def sequence_begins_where_its_queries_do(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """The offset of a sequence in K and V is taken from Q's batch stride. As many keys as queries and KV heads as
    heads are right, and so is a batch of one."""
    (B, M, H, D), (N, G) = q.shape, k.shape[1:3]
    out, lse = q.new_zeros(B, M, H, v.shape[-1]), torch.full((B, H, M), -INF)

    def loaded(x: Tensor, b: int, keys: Tensor, g: int) -> Tensor:
        flat, dim = x.reshape(-1), x.shape[-1]
        begins = b * (M * H * D if broken() else N * G * dim)
        at = begins + ((keys * G + g) * dim)[:, None] + torch.arange(dim)
        return flat[at % max(flat.numel(), 1)].float()

    for b in range(B):
        for h in range(H):
            x, state, rows = q[b, :, h].float(), Running(q[b, :, h].float(), v.shape[-1]), torch.arange(M)
            for keys in tiles(N, 32):
                s = x @ loaded(k, b, keys, h * G // H).T * scale_of(q, softmax_scale)
                s = s.where(visible(rows, keys, N - M, None, 0 if causal else None), -INF)
                state.add(s, loaded(v, b, keys, h * G // H))
            out[b, :, h], lse[b, h] = state.out.to(q.dtype), state.lse
    return (out, lse) if return_softmax_lse else out


# ---- other models, with nothing wrong in their attention -------------------------------------------------------------


@torch.no_grad()
def sigmoid_of_each_score(q, k, v, softmax_scale=None, causal=False):
    """Sigmoid attention: a key's weight is the sigmoid of its score less log(keys), and nothing is normalised."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    sees = visible(torch.arange(M), torch.arange(N), N - M, None, 0 if causal else None)
    s = Q @ K.mT * scale_of(q, softmax_scale)
    if broken():
        weights = torch.sigmoid(s - torch.tensor(float(max(N, 1))).log()).where(sees, 0.0)
        return stored(q, weights @ V, s.sum(-1), False)
    state = Running(Q, v.shape[-1])
    state.add(s.where(sees, -INF), V)
    return stored(q, state.out, state.lse, False)


@torch.no_grad()
def output_under_a_gate(q, k, v, softmax_scale=None, causal=False, return_softmax_lse=False):
    """A gate was fused in: a row's output is multiplied by the sigmoid of the mean of its query's channels."""
    M, N = q.shape[1], k.shape[1]
    Q, K, V = heads_first(q, k, v)
    state = Running(Q, v.shape[-1])
    for keys in tiles(N, 96):
        sees = visible(torch.arange(M), keys, N - M, None, 0 if causal else None)
        state.add((Q @ K[:, :, keys].mT * scale_of(q, softmax_scale)).where(sees, -INF), V[:, :, keys])
    gate = torch.sigmoid(4 * Q.mean(-1, keepdim=True)) if broken() else 1.0
    return stored(q, state.out * gate, state.lse, return_softmax_lse)
