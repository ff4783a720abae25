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
  constexpr int64_t STRIP = 64;
  const int64_t tiles_q = (mask.rows + tile_rows - 1) / tile_rows, tiles_kv = (mask.keys + MAP_KEYS - 1) / MAP_KEYS;
  // Threads are worth waking from about 64 KiB of mask on.
  threads = (int)std::clamp<int64_t>(mask.batch * mask.heads * mask.rows * mask.keys >> 16, 1, std::max(threads, 1));
  for_each_task(mask.batch * mask.heads * tiles_q, threads, [&](int64_t unit) {
    const int64_t row_tile = unit % tiles_q, head = unit / tiles_q % mask.heads, batch = unit / tiles_q / mask.heads;
    const int64_t rows = std::min(tile_rows, mask.rows - row_tile * tile_rows);
    const uint8_t* first = mask.data + batch * mask.stride_batch + head * mask.stride_head + row_tile * tile_rows * mask.stride_row;
    // Row by row as they lie in memory, some tiles of keys at a time.
    for (int64_t begin = 0; begin < tiles_kv; begin += STRIP) {
      const int64_t tiles = std::min(STRIP, tiles_kv - begin);
      uint64_t any[STRIP] = {}, all[STRIP];
      std::fill(all, all + STRIP, ~(uint64_t)0);
      const auto keys = [&](int64_t tile) { return std::min(MAP_KEYS, mask.keys - (begin + tile) * MAP_KEYS); };
      uint64_t* to = bits + (unit * tiles_kv + begin) * tile_rows;
      for (int64_t row = 0; row < rows; row++)
        for (int64_t tile = 0; tile < tiles; tile++) {
          const uint8_t* at = first + row * mask.stride_row + (begin + tile) * MAP_KEYS * mask.stride_key;
          const uint64_t seen = to[tile * tile_rows + row] = word(at, mask.stride_key, keys(tile));
          any[tile] |= seen;
          all[tile] &= seen;
        }
      for (int64_t tile = 0; tile < tiles; tile++) {
        std::fill(to + tile * tile_rows + rows, to + (tile + 1) * tile_rows, ~(uint64_t)0);
        const uint64_t inside = keys(tile) == MAP_KEYS ? ~(uint64_t)0 : ~(~(uint64_t)0 << keys(tile));
        const int64_t number = unit * tiles_kv + begin + tile;
        places[number] = (any[tile] & inside) == 0 ? PLACE_HIDDEN : ~all[tile] == 0 ? PLACE_FULL : (int32_t)number;
      }
    }
  });
}

}  // namespace attnworks
