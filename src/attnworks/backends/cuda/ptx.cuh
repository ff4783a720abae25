// Thin wrappers of the PTX that CUDA C++ has no word for. The wgmma wrappers are generated before this text (source.py),
// as their operand lists depend on the tile.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEV __device__ __forceinline__
#define INFINITE __int_as_float(0x7f800000)
constexpr float LOG2E = 1.44269504089f, LN2 = 0.69314718056f;

struct alignas(64) TensorMap {
  u64 words[16];
};

// ---- mbarriers: counted arrivals and, for TMA, bytes; a wait is for the phase of the given parity to be over
DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void barrier_init(u32 b, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(arrivals)); }
// Makes the initialised barriers visible to the copy engine; a __syncthreads() must follow for the other threads.
DEV void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Arrives, and adds to what the phase waits for the bytes that TMA is going to write.
DEV void barrier_expect(u32 b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
DEV void barrier_arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
DEV void barrier_wait(u32 b, u32 parity) {
  asm volatile(
      "{.reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra.uni E; bra.uni W; E: }" ::"r"(b),
      "r"(parity)
      : "memory");
}

// ---- shared memory by address
DEV void shared_store(u32 to, int4 x) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
DEV int4 shared_load(u32 from) {
  int4 x;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
  return x;
}

// Four matrices of 8 x 8 two-byte elements: lane l gives the place of row l % 8 of matrix l / 8, and of each matrix the two
// neighbours that it holds of an accumulator.
DEV void shared_store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// The same the other way, as operands of mma(), a row's two neighbours in a register.
DEV void shared_load_matrices(u32 (&x)[2], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(from) : "memory");
}
DEV void shared_load_matrices(u32 (&x)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}

// ---- device memory that no launch writes to; read where it stands in the text, so that what follows hides its latency
DEV int load_constant(const int* from) {
  int x;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}
DEV int4 load_constant(const int4* from) {
  int4 x;
  asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}

DEV void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// ---- named barriers of several warps
DEV void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEV void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- copies: a box of a tensor to shared memory, elements outside of the tensor as 0
DEV void tma_load(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
DEV void tma_load(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6,%7}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The same box to the L2 alone.
DEV void tma_prefetch(const TensorMap* map, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1,%2,%3,%4}];" ::"l"(map), "r"(c0), "r"(c1), "r"(c2),
               "r"(c3)
               : "memory");
}
// A box from shared memory, but for what of it lies outside of the tensor.
DEV void tma_store(const TensorMap* map, u32 from, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2,%3,%4,%5}], [%1];" ::"l"(map), "r"(from),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
DEV void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the boxes that this thread committed have been read: their memory may be written again, or given up.
DEV void tma_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Makes this thread's writes to shared memory visible to the copy engine.
DEV void tma_store_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- one kernel after another on a stream, where the second was launched to begin early (split.py): its thread blocks come
// where one of the first has ended, once all of the first have said so or ended, and wait until all that those wrote is there
DEV void next_kernel_may_begin() { asm volatile("griddepcontrol.launch_dependents;"); }
DEV void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- registers: a warpgroup gives some up, or takes what others gave up
template <int N> DEV void registers_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEV void registers_give() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// ---- wgmma: products run beside the warpgroup that issued them
// Orders the warpgroup's earlier writes of accumulators and register operands before the products that follow.
DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most N of the committed groups are still running; only then may their registers be touched.
template <int N> DEV void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// The compiler doesn't know that products run on: this keeps it from moving reads or writes of their registers over it.
template <int N> DEV void pin(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}
template <int N> DEV void pin(u32 (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(r[i])::"memory");
}
// Describes a tile in shared memory whose rows of 64 elements lie in 128-byte swizzled lines. `chunk`: bytes from one 64
// columns to the next, which matters only where the product runs over rows (V).
DEV u64 descriptor(u32 address, u32 chunk) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(chunk >> 4) << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}

// ---- mma: a product of one warp alone. d += A B, 16 x 8 of it; d lies as eight columns of a warpgroup's accumulator do.
DEV void mma(float& d0, float& d1, float& d2, float& d3, const u32 (&a)[4], u32 b0, u32 b1) {
#if BF16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
               : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- arithmetic
DEV float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV u32 pack(float low, float high) {  // two floats rounded to the input dtype
  u32 r;
#if BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
  return r;
}
