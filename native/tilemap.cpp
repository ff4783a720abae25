#include "tilemap.h"

#include <string.h>

#include <algorithm>

#include "parallel.h"

namespace attnworks {
namespace {

// Bit i: whether byte i of x is not 0.
uint64_t bits_of_bytes(uint64_t x) {
  constexpr uint64_t LOW = 0x0101010101010101, HIGH = LOW << 7;
  const uint64_t set = (((x & ~HIGH) + ~HIGH) | x) & HIGH;  // the top bit of every byte that is not 0
  return (set >> 7) * 0x0102040810204080 >> 56;
}

// The first `count` <= 64 keys of a row; the other bits are 1.
uint64_t word(const uint8_t* keys, int64_t stride, int64_t count) {
  uint64_t bits = 0;
  if (stride == 1 && count == MAP_KEYS) {
    for (int n = 0; n < 8; n++) {
      uint64_t bytes;
      memcpy(&bytes, keys + 8 * n, 8);
      bits |= bits_of_bytes(bytes) << 8 * n;
    }
    return bits;
  }
  for (int64_t j = 0; j < count; j++) bits |= (uint64_t)(keys[j * stride] != 0) << j;
  return count == MAP_KEYS ? bits : bits | ~(uint64_t)0 << count;
}

}  // namespace

void pack_mask(const MaskTensor& mask, int64_t tile_rows, int32_t* places, uint64_t* bits, int threads) {
  const int64_t tiles_q = (mask.rows + tile_rows - 1) / tile_rows, tiles_kv = (mask.keys + MAP_KEYS - 1) / MAP_KEYS;
  // Threads are worth waking from about 64 KiB of mask on.
  threads = (int)std::clamp<int64_t>(mask.batch * mask.heads * mask.rows * mask.keys >> 16, 1, std::max(threads, 1));
  for_each_task(mask.batch * mask.heads * tiles_q, threads, [&](int64_t unit) {
    const int64_t row_tile = unit % tiles_q, head = unit / tiles_q % mask.heads, batch = unit / tiles_q / mask.heads;
    const int64_t rows = std::min(tile_rows, mask.rows - row_tile * tile_rows);
    const uint8_t* first = mask.data + batch * mask.stride_batch + head * mask.stride_head + row_tile * tile_rows * mask.stride_row;
    for (int64_t tile = 0; tile < tiles_kv; tile++) {
      const int64_t number = unit * tiles_kv + tile, count = std::min(MAP_KEYS, mask.keys - tile * MAP_KEYS);
      uint64_t* to = bits + number * tile_rows;
      uint64_t any = 0, all = ~(uint64_t)0;
      for (int64_t row = 0; row < rows; row++) {
        to[row] = word(first + row * mask.stride_row + tile * MAP_KEYS * mask.stride_key, mask.stride_key, count);
        any |= to[row];
        all &= to[row];
      }
      for (int64_t row = rows; row < tile_rows; row++) to[row] = ~(uint64_t)0;
      const uint64_t inside = count == MAP_KEYS ? ~(uint64_t)0 : ~(~(uint64_t)0 << count);
      places[number] = (any & inside) == 0 ? PLACE_HIDDEN : ~all == 0 ? PLACE_FULL : (int32_t)number;
    }
  });
}

}  // namespace attnworks
