// x [version * rows, K] times weight [version, N, K], for up to 256 rows a version: see wide.py.
//
//   copying warp    weights -> wait for the kernel before -> x, refill what has been multiplied
//   two warp groups  wait for a stage -> multiply -> give it back;  at the end: turn, write
//
// Given with -D: TILES, STAGES of the ring, GATE (silu(gate) * up is written). What is written is
// bfloat16, the parts of a split K too: as float32 they would take longer to write than to compute.

typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) Map { u64 opaque[16]; };  // a CUtensorMap

// A program has 128 rows of weights, or 64, or 64 and with its neighbour another 64, of which each
// multiplies half of the rows of x: 96 for each, so that 12,288 rows make 128 programs.
enum { WHOLE, HALF, SHARED };

constexpr int ROWS = 256, K = 64, TILE = 64;     // rows of x; of one step: values of K; rows of weights
constexpr int ROW_BYTES = K * 2;                 // as wide as the swizzle
constexpr int TILE_BYTES = TILE * ROW_BYTES, X_BYTES = ROWS * ROW_BYTES;
constexpr int W_BYTES = (TILES == HALF ? 1 : 2) * TILE_BYTES, STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int CONSUMERS = 2;                     // warp groups that multiply; one more warp copies
constexpr u64 ONCE = 0x12F0000000000000ull, OFTEN = 0x14F0000000000000ull;  // evict first, evict last

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN;\n}" ::"r"(barrier), "r"(phase) : "memory");
}
__device__ __forceinline__ void init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void copy(const Map& map, u32 to, u32 barrier, int k, int row, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
      ::"r"(to), "l"(&map), "r"(k), "r"(row), "r"(barrier), "l"(policy) : "memory");
}
// Gate and up in turns of eight rows, so that a thread has both of one output.
__device__ __forceinline__ void copy_gated(const Map& map, u32 to, u32 barrier, int k, int group, int version, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %3, %4, %5}], [%6], %7;"
      ::"r"(to), "l"(&map), "r"(k), "r"(0), "r"(group), "r"(version), "r"(barrier), "l"(policy) : "memory");
}

// A matrix of rows of 128 swizzled bytes, for the tensor cores.
__device__ __forceinline__ u64 operand(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
template <int N> __device__ void multiply_add(float (&sum)[N / 2], u64 weights, u64 rows, int add);
PRODUCTS  // of 256 and of 128 rows, written by wide.py

__device__ __forceinline__ u32 pack(float low, float high) {  // two bfloat16
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __uint_as_float(both & 0xFFFF0000u); }

__device__ __forceinline__ float one_plus_exp(float x) {  // not so large that the product of two is infinite
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(fminf(1.4426950408889634f * x, 60.f)));
  return 1.f + power;
}

// Of two rows of x, rounded as the separate kernels round.
__device__ __forceinline__ u32 gated(const float* c) {
  const u32 gate = pack(c[0], c[1]), up = pack(c[2], c[3]);
  // One reciprocal for both silus, x / (1 + exp(-x)).
  const float a = low(gate), b = high(gate);
  const float below_a = one_plus_exp(-a), below_b = one_plus_exp(-b);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(below_a * below_b));
  const u32 active = pack(a * (inverse * below_b), b * (inverse * below_a));
  return pack(low(active) * low(up), high(active) * high(up));
}

__device__ __forceinline__ void store_turned(u32 to, u32 a, u32 b, u32 c, u32 d) {  // four 8 x 8
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// One warp group's 64 rows of weights with N rows of x, over all steps of this program.
template <int N>
__device__ __forceinline__ void multiply(float (&sum)[N / 2], u32 ring, u32 full, u32 empty, int steps, u32 weights, u32 rows) {
  u32 stage = 0, phase = 0, last = 0;
  for (int i = 0; i < steps; ++i) {
    wait(full + 8 * stage, phase);
    const u32 at = ring + stage * STAGE_BYTES;
    const u64 a = operand(at + weights), b = operand(at + W_BYTES + rows);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < K / 16; ++k) multiply_add<N>(sum, a + 2 * k, b + 2 * k, i + k > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (i > 0) {  // the step before has ended
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (threadIdx.x % 128 == 0) arrive(empty + 8 * last);
    }
    last = stage;
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// [64 rows of weights, N rows of x from `row` on] of one warp group to out [rows, width]. Turned in
// shared memory, so that whole lines of a row are written.
template <int N>
__device__ __forceinline__ void store(float (&sum)[N / 2], u32 scratch, void* out, int tile, int row, int rows, int width) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  constexpr int COLUMNS = GATE ? TILE / 2 : TILE, PITCH = COLUMNS * 2 + 16, PIECES = COLUMNS / 8;
#pragma unroll
  for (int j = 0; j < N / 8; j += GATE ? 4 : 2) {
    const float* c = sum + 4 * j;
#if GATE
    store_turned(scratch + (8 * j + lane) * PITCH + warp * 16, gated(c), gated(c + 4), gated(c + 8), gated(c + 12));
#else
    const int m = 8 * j + lane % 8 + lane / 16 * 8, n = warp * 16 + lane / 8 % 2 * 8;
    store_turned(scratch + m * PITCH + n * 2, pack(c[0], c[1]), pack(c[2], c[3]), pack(c[4], c[5]), pack(c[6], c[7]));
#endif
  }
  asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory");
#pragma unroll
  for (int i = 0; i < N * PIECES / 128; ++i) {
    const int m = (i * 128 + thread) / PIECES, piece = thread % PIECES;
    u32 v[4];
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(scratch + m * PITCH + piece * 16));
    char* to = (char*)out + ((u64)(row + m) * width + tile * COLUMNS + piece * 8) * 2;
    if (row + m < rows) *(uint4*)to = make_uint4(v[0], v[1], v[2], v[3]);
  }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS * 128 + 32, 1)
wide(const __grid_constant__ Map x_map, const __grid_constant__ Map weight_map, void* out, int rows, int n, int steps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const u32 ring = shared_address(memory), full = shared_address(barriers), empty = full + 8 * STAGES;
  const int program = blockIdx.x, split = blockIdx.y, version = blockIdx.z, first = split * steps;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) init(full + 8 * s, 1), init(empty + 8 * s, CONSUMERS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int mine = TILES == WHOLE ? 2 * program : TILES == HALF ? program : program / 2 * 3 + program % 2;
  const int other = TILES == WHOLE ? mine + 1 : program / 2 * 3 + 2;

  if (threadIdx.x >= CONSUMERS * 128) {
    if (threadIdx.x > CONSUMERS * 128) return;
    auto copy_weights = [&](int i, u32 stage) {
      const u32 to = ring + stage * STAGE_BYTES, barrier = full + 8 * stage;
      expect(barrier, STAGE_BYTES);
      for (int t = 0; t < W_BYTES / TILE_BYTES; ++t) {
        const int tile = t ? other : mine;
#if GATE
        copy_gated(weight_map, to + t * TILE_BYTES, barrier, (first + i) * K, tile * (TILE / 16), version, ONCE);
#else
        copy(weight_map, to + t * TILE_BYTES, barrier, (first + i) * K, version * n + tile * TILE, ONCE);
#endif
      }
    };
    auto copy_rows = [&](int i, u32 stage) {
      copy(x_map, ring + stage * STAGE_BYTES + W_BYTES, full + 8 * stage, (first + i) * K, version * rows, OFTEN);
    };
    const int early = steps < STAGES ? steps : STAGES;
    for (int i = 0; i < early; ++i) copy_weights(i, i);
    asm volatile("griddepcontrol.wait;" ::: "memory");  // only x is of the kernel before
    for (int i = 0; i < early; ++i) {
      if (i == 2) wait(full, 0);  // all at once, the first would come later
      copy_rows(i, i);
    }
    u32 stage = 0, phase = 0;
    for (int i = STAGES; i < steps; ++i) {
      wait(empty + 8 * stage, phase);
      copy_weights(i, stage);
      copy_rows(i, stage);
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    return;
  }
  const int group = threadIdx.x / 128, width = GATE ? n / 2 : n;
  const u64 before = ((u64)split * gridDim.z + version) * rows;
  void* to = (char*)out + before * width * 2;
  // The ring is scratch memory once both groups have read all of it.
  const u32 scratch = ring + group * ROWS * (TILE * 2 + 16);
  if (TILES == WHOLE || (TILES == SHARED && group == 0)) {
    float sum[ROWS / 2];
    multiply<ROWS>(sum, ring, full, empty, steps, group * TILE_BYTES, 0);
    asm volatile("bar.sync 3, 256;" ::: "memory");
    store<ROWS>(sum, scratch, to, group ? other : mine, 0, rows, width);
  } else {
    const int row = (TILES == SHARED ? program % 2 : group) * (ROWS / 2);
    float sum[ROWS / 4];
    multiply<ROWS / 2>(sum, ring, full, empty, steps, TILES == SHARED ? TILE_BYTES : 0, row * ROW_BYTES);
    asm volatile("bar.sync 3, 256;" ::: "memory");
    store<ROWS / 2>(sum, scratch, to, TILES == SHARED ? other : mine, row, rows, width);
  }
}

