// From a boolean tensor to the tile map that the kernels read (attention.h).
#pragma once
#include "attention.h"

namespace attnworks {

// A boolean tensor (batch, heads, rows, keys), true where a key is visible: bytes, any distances between neighbours.
struct MaskTensor {
  const uint8_t* data;
  int64_t batch, heads, rows, keys;
  int64_t stride_batch, stride_head, stride_row, stride_key;
};

// Writes places (batch, heads, tiles of queries, tiles of keys) and bits (a tile's number, its rows) for tiles of tile_rows queries
// (MAP_ROWS, or 1 if rows is 1) and MAP_KEYS keys. The place of a tile that is neither hidden nor full is its number, counted
// through; the bits of others are undefined. What lies past the rows and keys counts as visible: nobody asks for it.
void pack_mask(const MaskTensor&, int64_t tile_rows, int32_t* places, uint64_t* bits, int threads);

}  // namespace attnworks
