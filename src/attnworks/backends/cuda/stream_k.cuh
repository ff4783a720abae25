// Stream-K (arXiv:2301.03598): tiles of rows that would fill only a part of the last wave are shared by the whole card. All their
// KV tiles in a row are cut into stretches of one length, one for each thread block, which so has parts of one or two tiles of
// rows. merge.cuh puts the parts together.
struct Stretches {
  int whole;     // tiles of rows before the shared ones
  int kv_tiles;  // of a tile of rows
  int steps;     // KV tiles of all shared tiles of rows
  int workers;   // stretches
};
DEV int stretch_begin(const Stretches& s, int worker) { return (int)((i64)worker * s.steps / s.workers); }
DEV int stretch_of(const Stretches& s, int step) { return (int)((((i64)step + 1) * s.workers - 1) / s.steps); }
