// Decode attention over paged keys and values, one warp a program: see paged.py.
//
//   ask for the first tiles -> wait for the kernel before -> queries, the tile of the newest token
//   per tile: wait for keys -> scores -> ask for the next -> weights -> wait for values -> add
//
// Given with -D: DIM of a head, GROUP of query heads, BLOCK and TILE tokens, RING tiles in flight (keys and values in turn),
// FRESH tokens before the newest that the kernel before may have written, too.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int STEPS = DIM / 16, GROUPS = TILE / 16;   // 16 dimensions; 16 tokens
constexpr int TILE_BYTES = TILE * DIM * 2, PART_BYTES = TILE * 128, GROUP_BYTES = 16 * 128;
constexpr int PIECES = DIM / 8, ROWS = 32 / PIECES;   // of 16 bytes in a row; rows of one copy
constexpr float NOTHING = -1e30f;

// Of 16 bytes in a tile: parts of 64 dimensions, in rows of 128 bytes that are turned against each other, so that eight
// rows of a column lie in different banks.
__device__ __forceinline__ u32 place_of(int token, int piece) {
  return piece / 8 * PART_BYTES + token * 128 + ((piece ^ token) % 8) * 16;
}
__device__ __forceinline__ void copy(u32 to, const u16* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_or_zero(u32 to, const u16* from, bool here) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(here ? 16 : 0) : "memory");
}
__device__ __forceinline__ void load(u32 (&a)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_turned(u32 (&a)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ u32 turn(u32 a) {
  u32 b;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(b) : "r"(a));
  return b;
}
__device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 pack(float low, float high) {  // two bfloat16
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Over the lanes that have the same columns.
__device__ __forceinline__ float greatest(float x) {
  for (int i = 4; i < 32; i *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
  return x;
}
__device__ __forceinline__ float sum_of(float x) {
  for (int i = 4; i < 32; i *= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}

extern "C" __global__ void __launch_bounds__(32, 6)
paged(const u16* q, const u16* pool, const int* table, const long long* slots, const int* positions, u16* out, float* part_out,
      float* peak_out, float* sum_out, float scale, int plane_blocks, int table_stride, int least) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 ring = (u32)__cvta_generic_to_shared(memory);
  const int lane = threadIdx.x, head = blockIdx.x, row = blockIdx.y, split = blockIdx.z, num_kv = gridDim.x, splits = gridDim.z;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int position = positions[row], num_blocks = position / BLOCK + 1;
  const int each = max((num_blocks + splits - 1) / splits, least), begin = split * each, end = min(begin + each, num_blocks);
  const u64 unit = ((u64)row * num_kv + head) * GROUP;
  if (begin >= end) {  // its sums are never read
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (lane < GROUP) peak_out[(unit + lane) * splits + split] = NOTHING, sum_out[(unit + lane) * splits + split] = 0.f;
    return;
  }
  const int* blocks = table + slots[row] * table_stride;
  int numbered = begin, numbers = blocks[min(begin + lane, end - 1)];  // of 32 blocks
  // Tiles. That of the newest token is of the kernel before and may have tokens behind it.
  const int first = begin * (BLOCK / TILE), newest = position / TILE, last = min(end * (BLOCK / TILE), newest + 1);
  const int old = FRESH ? max(position - FRESH, 0) / TILE : newest;

  const int copy_row = lane / PIECES, piece = lane % PIECES;
  u32 copy_at[8 / ROWS];
#pragma unroll
  for (int i = 0; i < 8 / ROWS; ++i) copy_at[i] = place_of(i * ROWS + copy_row, piece);
  auto ask = [&](int tile) {  // the n-th of this program's
    const int index = first + tile / 2, block_index = index * TILE / BLOCK;
    if (index < last) {
      if (block_index >= numbered + 32) numbered += 32, numbers = blocks[min(numbered + lane, end - 1)];
      const int block = __shfl_sync(~0u, numbers, block_index - numbered) + tile % 2 * plane_blocks;
      const u16* from = pool + (((u64)block * num_kv + head) * BLOCK + index * TILE % BLOCK + copy_row) * DIM + piece * 8;
      const u32 to = ring + tile % RING * TILE_BYTES;
      const int left = position - index * TILE - copy_row;  // rows behind this lane's first that are of the context
      if (index < newest) {
#pragma unroll
        for (int i = 0; i < TILE / ROWS; ++i) copy(to + copy_at[i % (8 / ROWS)] + i / (8 / ROWS) * 1024, from + i * ROWS * DIM);
      } else {
#pragma unroll
        for (int i = 0; i < TILE / ROWS; ++i)
          copy_or_zero(to + copy_at[i % (8 / ROWS)] + i / (8 / ROWS) * 1024, from + i * ROWS * DIM, i * ROWS <= left);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  auto await = [&]() {
    asm volatile("cp.async.wait_group %0;" ::"n"(RING - 1) : "memory");
    __syncwarp();
  };

  int asked = 0;
  for (; asked < RING && first + asked / 2 < min(old, last); ++asked) ask(asked);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  u32 queries[STEPS][2];
  const u16* mine = q + (unit + lane / 4) * DIM + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < STEPS; ++i)
    for (int j = 0; j < 2; ++j) queries[i][j] = lane / 4 < GROUP ? *(const u32*)(mine + i * 16 + j * 8) : 0;
  for (; asked < RING; ++asked) ask(asked);

  u32 key_at[4], value_at[4];  // of a lane's row of 16 x 16 values, in 64 dimensions
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    key_at[i] = place_of(lane % 16, 2 * i + lane / 16);
    value_at[i] = place_of(lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2);
  }
  float sum[STEPS][4] = {}, peak[2] = {NOTHING, NOTHING}, total[2] = {};
  for (int index = first, tile = 0; index < last; ++index, tile += 2) {
    await();
    float score[GROUPS][4] = {};
    const u32 keys = ring + tile % RING * TILE_BYTES;
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        u32 a[4];
        load(a, keys + i / 4 * PART_BYTES + g * GROUP_BYTES + key_at[i % 4]);
        multiply_add(score[g], a, queries[i][0], queries[i][1]);
      }
    __syncwarp();
    ask(tile + RING);
    if (index == newest) {
      const int left = position % TILE + 1 - lane / 4;
#pragma unroll
      for (int g = 0; g < GROUPS; ++g)
        for (int j = 0; j < 4; ++j) if (g * 16 + j / 2 * 8 >= left) score[g][j] = NOTHING / scale;
    }
    float next[2] = {score[0][0], score[0][1]};
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
      for (int j = 0; j < 4; ++j) next[j % 2] = fmaxf(next[j % 2], score[g][j]);
    for (int j = 0; j < 2; ++j) next[j] = fmaxf(peak[j], greatest(next[j]) * scale);
    if (__any_sync(~0u, next[0] > peak[0] || next[1] > peak[1])) {
      for (int j = 0; j < 2; ++j) {
        const float share = power(peak[j] - next[j]);
        total[j] *= share;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) sum[i][j] *= share, sum[i][2 + j] *= share;
        peak[j] = next[j];
      }
    }
    u32 weight[GROUPS][2];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
      for (int j = 0; j < 2; ++j) {
        const float a = power(score[g][2 * j] * scale - peak[0]), b = power(score[g][2 * j + 1] * scale - peak[1]);
        total[0] += a, total[1] += b;
        weight[g][j] = turn(pack(a, b));
      }
    await();
    const u32 values = ring + (tile + 1) % RING * TILE_BYTES;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        u32 a[4];
        load_turned(a, values + i / 4 * PART_BYTES + g * GROUP_BYTES + value_at[i % 4]);
        multiply_add(sum[i], a, weight[g][0], weight[g][1]);
      }
    __syncwarp();
    ask(tile + 1 + RING);
  }
  for (int j = 0; j < 2; ++j) total[j] = sum_of(total[j]);
  if (splits == 1) {
    const float share[2] = {1.f / total[0], 1.f / total[1]};
    u16* to = out + (unit + lane / 4) * DIM + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
      for (int j = 0; j < 2; ++j) {
        const u32 pair = turn(pack(sum[i][2 * j] * share[0], sum[i][2 * j + 1] * share[1]));
        if (lane / 4 < GROUP) *(u32*)(to + i * 16 + j * 8) = pair;
      }
    return;
  }
  for (int j = 0; j < 2; ++j) {
    const int g = lane % 4 * 2 + j;
    if (g >= GROUP) continue;
    const u64 part = (unit + g) * splits + split;
    if (lane < 4) peak_out[part] = peak[j], sum_out[part] = total[j];
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
      for (int k = 0; k < 2; ++k) part_out[part * DIM + i * 16 + k * 8 + lane / 4] = sum[i][2 * k + j];
  }
}
