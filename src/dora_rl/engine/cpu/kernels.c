/* The forward pass of a dense decoder on the CPU, float32: one call for all rows of a step.

   Every output element is computed by one fixed sequence of operations on its own row (and its own
   context), whoever stands beside it: sums run over k, over lanes and over tokens in an order that
   depends on the row alone. So a row comes out bit for bit the same alone, in a batch, by decode
   and by prefill. Compiled at first use with the machine's C compiler (see compiled.py); nothing
   here allocates, and nothing writes outside the buffers it is given.

   A matrix [N, K] is packed in place: panels of PANEL rows are stored as [K][PANEL], then one of
   LANES rows if it fits, then what is left as [K][rest]. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define TILE 12 /* rows of x at once: 24 accumulators of 32 registers */
#else
#define LANES 8
#define TILE 6
#endif
#define PANEL (2 * LANES)
#define CHUNK 64 /* tokens whose weights are summed at once before a draw */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float vec_at __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

INLINE vec load(const float *p) { return *(const vec_at *)p; }
INLINE void store(float *p, vec v) { *(vec_at *)p = v; }

INLINE vec choose(ivec mask, vec yes, vec no) {
  return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

/* Lanes of a and b, by number: b's begin at LANES. */
#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

/* Each group of lanes of a, then of b, folded to half its size: lower half plus upper half. */
#if LANES == 16
#define FOLD_16(a, b)                                                     \
  (PICK(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + \
   PICK(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define FOLD_8(a, b)                                                       \
  (PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) + \
   PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
#define FOLD_4(a, b)                                                      \
  (PICK(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) + \
   PICK(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31))
#define FOLD_2(a, b)                                                      \
  (PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) + \
   PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))
#else
#define FOLD_8(a, b) \
  (PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15))
#define FOLD_4(a, b) \
  (PICK(a, b, 0, 1, 4, 5, 8, 9, 12, 13) + PICK(a, b, 2, 3, 6, 7, 10, 11, 14, 15))
#define FOLD_2(a, b) \
  (PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15))
#endif

/* The sum of each of LANES vectors, as one vector; the same tree of sums for each. */
INLINE vec sums_of(vec v[LANES]) {
  int count = LANES;
#if LANES == 16
  UNROLL for (int i = 0; i < count / 2; i++) v[i] = FOLD_16(v[2 * i], v[2 * i + 1]);
  count /= 2;
#endif
  UNROLL for (int i = 0; i < count / 2; i++) v[i] = FOLD_8(v[2 * i], v[2 * i + 1]);
  count /= 2;
  UNROLL for (int i = 0; i < count / 2; i++) v[i] = FOLD_4(v[2 * i], v[2 * i + 1]);
  return FOLD_2(v[0], v[1]);
}

INLINE float sum_of(vec v) {
#if LANES == 16
  v = FOLD_16(v, v);
#endif
  v = FOLD_8(v, v);
  v = FOLD_4(v, v);
  return FOLD_2(v, v)[0];
}

/* exp(x) for x <= 0, within two units in the last place; 0 below -87; NaN stays NaN. */
INLINE vec exp_of(vec x) {
  vec zero = {0};
  vec low = zero - 87.0f;
  ivec tiny = x < low;
  vec n = x * 1.44269504f + 12582912.0f; /* rounds to the nearest integer */
  ivec bits = (ivec)n;
  n -= 12582912.0f;
  vec r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vec p = zero + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  vec scale = (vec)((bits + 127) << 23);
  vec y = p * scale;
  return (vec)(((ivec)y) & ~tiny);
}

typedef struct {
  const float *norm1, *qkv, *qkv_bias, *qk_norm, *o, *o_bias;
  const float *norm2, *gate_up, *gate_up_bias, *down, *down_bias;
  const float *post1, *post2, *cos, *sin; /* norms of what is added; rotary tables */
  int64_t window;                         /* tokens that a query sees; 0: all */
} Layer;

typedef struct {
  int64_t num_layers, hidden, heads, kv_heads, dim, inner, vocab, tied, gelu, qk_whole;
  float eps, scale, embed_scale;
  const float *embed, *norm, *lm_head;
  const Layer *layers;
} Model;

typedef struct {
  int64_t slot, start, stop;
} Segment;

typedef struct {
  int64_t num_rows, num_segments, table_width, block_tokens, num_blocks, threads;
  const int64_t *token_ids, *positions, *table_rows, *table, *logit_rows;
  const Segment *segments;       /* of rows */
  const Segment *logit_segments; /* of logit rows */
  float *kv;                     /* [layer, 2, block, kv head, token, dim] */
  float *x, *h, *wide, *mixed;   /* scratch: a row each for hidden, normed, wide, attended */
  float *score;                  /* scratch: `score_width` for each thread */
  int64_t score_width;
  float *logits;
} Step;

int64_t dora_lanes(void) { return LANES; }
int64_t dora_panel(void) { return PANEL; }
int64_t dora_sizes(int64_t which) {
  return which == 0 ? sizeof(Layer) : which == 1 ? sizeof(Model) : sizeof(Step);
}

/* ------------------------------------------------------------------------------- products */

static void pack_panel(float *w, int64_t width, int64_t K, float *copy) {
  memcpy(copy, w, sizeof(float) * width * K);
  for (int64_t k = 0; k < K; k++)
    for (int64_t n = 0; n < width; n++) w[k * width + n] = copy[n * K + k];
}

/* `copy` has room for PANEL * K floats. */
void dora_pack(float *w, int64_t N, int64_t K, float *copy) {
  int64_t n = 0;
  for (; n + PANEL <= N; n += PANEL) pack_panel(w + n * K, PANEL, K, copy);
  if (n + LANES <= N) pack_panel(w + n * K, LANES, K, copy), n += LANES;
  if (n < N) pack_panel(w + n * K, N - n, K, copy);
}

/* Row `row` of a packed matrix. */
INLINE void unpack_row(const float *w, int64_t N, int64_t K, int64_t row, float *out) {
  int64_t first = row / PANEL * PANEL, width = PANEL;
  if (first + PANEL > N) {
    width = LANES;
    if (first + LANES > N || row >= first + LANES) {
      if (first + LANES <= N) first += LANES;
      width = N - first;
    }
  }
  const float *at = w + first * K + (row - first);
  for (int64_t k = 0; k < K; k++) out[k] = at[k * width];
}

/* R rows of x times VECS * LANES columns; out = or += the product (+ bias). */
INLINE void tile(const int R, const int VECS, const float *x, int64_t ldx, int64_t K,
                 const float *w, const float *bias, float *out, int64_t ldo, int add) {
  vec sum[TILE][2];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < VECS; v++) sum[r][v] = (vec){0};
  for (int64_t k = 0; k < K; k++, w += VECS * LANES) {
    vec column[2];
    UNROLL for (int v = 0; v < VECS; v++) column[v] = load(w + v * LANES);
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int v = 0; v < VECS; v++) sum[r][v] += column[v] * x[r * ldx + k];
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < VECS; v++) {
      float *at = out + r * ldo + v * LANES;
      vec y = sum[r][v];
      if (bias) y += load(bias + v * LANES);
      if (add) y += load(at);
      store(at, y);
    }
}

#define CASE(n) \
  case n: tile(n, VECS, x, ldx, K, w, bias, out, ldo, add); break;
#if TILE == 12
#define MORE_CASES CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11)
#else
#define MORE_CASES
#endif

#define PANEL_FUNCTION(name, count)                                                            \
  static void name(int64_t rows, const float *x, int64_t ldx, int64_t K, const float *w,       \
                   const float *bias, float *out, int64_t ldo, int add) {                      \
    enum { VECS = count };                                                                     \
    for (; rows >= TILE; rows -= TILE, x += TILE * ldx, out += TILE * ldo)                     \
      tile(TILE, VECS, x, ldx, K, w, bias, out, ldo, add);                                     \
    switch (rows) {                                                                            \
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) MORE_CASES                                       \
    }                                                                                          \
  }
PANEL_FUNCTION(full_panel, 2)
PANEL_FUNCTION(half_panel, 1)

static void rest_panel(int64_t rows, const float *x, int64_t ldx, int64_t K, const float *w,
                       int64_t width, const float *bias, float *out, int64_t ldo, int add) {
  for (int64_t r = 0; r < rows; r++) {
    float sum[LANES] = {0};
    for (int64_t k = 0; k < K; k++)
      for (int64_t n = 0; n < width; n++) sum[n] = fmaf(w[k * width + n], x[r * ldx + k], sum[n]);
    for (int64_t n = 0; n < width; n++) {
      float y = sum[n];
      if (bias) y += bias[n];
      out[r * ldo + n] = add ? out[r * ldo + n] + y : y;
    }
  }
}

/* out [rows, N] = (or +=) x [rows, K] times the packed w, plus bias; rows of x are ldx apart. */
void dora_linear(const float *x, int64_t ldx, int64_t rows, int64_t K, const float *w, const float *bias,
                 float *out, int64_t N, int64_t add, int64_t threads) {
  int64_t panels = N / PANEL;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t p = 0; p < panels; p++)
    full_panel(rows, x, ldx, K, w + p * PANEL * K, bias ? bias + p * PANEL : 0, out + p * PANEL, N,
               add);
  int64_t n = panels * PANEL;
  if (n + LANES <= N) {
    half_panel(rows, x, ldx, K, w + n * K, bias ? bias + n : 0, out + n, N, add);
    n += LANES;
  }
  if (n < N)
    rest_panel(rows, x, ldx, K, w + n * K, N - n, bias ? bias + n : 0, out + n, N, add);
}

/* -------------------------------------------------------------------------------- one row */

/* out = x / rms(x) * weight; `width` is a multiple of LANES. */
INLINE void norm_row(const float *x, const float *weight, float *out, int64_t width, float eps) {
  vec squares = {0};
  for (int64_t i = 0; i < width; i += LANES) squares += load(x + i) * load(x + i);
  float factor = 1.0f / sqrtf(sum_of(squares) / (float)width + eps);
  for (int64_t i = 0; i < width; i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
}

/* Rows of x normed, or as they are where a layer has no such norm. */
static void norm_rows(const float *x, const float *weight, float *out, int64_t rows, int64_t width,
                      float eps, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t t = 0; t < rows; t++)
    if (weight)
      norm_row(x + t * width, weight, out + t * width, width, eps);
    else
      memcpy(out + t * width, x + t * width, sizeof(float) * width);
}

/* x += the product of `from`, or the norm of it, which `scratch` has room for. */
static void add_product(float *x, const float *from, int64_t ldf, int64_t rows, int64_t K,
                        const float *w, const float *bias, const float *post, float *scratch,
                        int64_t width, float eps, int64_t threads) {
  dora_linear(from, ldf, rows, K, w, bias, post ? scratch : x, width, !post, threads);
  if (!post) return;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t t = 0; t < rows; t++) {
    float *at = scratch + t * width, *sum = x + t * width;
    norm_row(at, post, at, width, eps);
    for (int64_t i = 0; i < width; i += LANES) store(sum + i, load(sum + i) + load(at + i));
  }
}

/* gate = act(gate) * up: silu(g) = g * sigmoid(g), gelu(g) = g * sigmoid(2u), u that of its tanh. */
INLINE void gate_row(const int GELU, float *gate, const float *up, int64_t inner) {
  for (int64_t j = 0; j < inner; j += LANES) {
    vec g = load(gate + j), zero = {0};
    vec z = GELU ? 1.5957691216f * (g + 0.044715f * g * g * g) : g;
    ivec positive = z > zero;
    vec e = exp_of(choose(positive, -z, z));
    vec sigmoid = choose(positive, zero + 1.0f, e) / (1.0f + e);
    store(gate + j, g * sigmoid * load(up + j));
  }
}

/* Norm, turn and scale the heads of one row; write its keys and values into its block. */
static void place_row(const Model *m, const Step *s, const Layer *layer, int64_t index,
                      int64_t slot, int64_t row, float *qkv) {
  int64_t dim = m->dim, half = dim / 2, position = s->positions[row];
  int64_t turned = m->heads + m->kv_heads;
  const float *cos = layer->cos + position * dim, *sin = layer->sin + position * dim;
  const float *weight = layer->qk_norm ? layer->qk_norm + slot * turned * dim : 0;
  int64_t num_q = m->heads * dim, num_k = m->kv_heads * dim;
  if (weight && m->qk_whole) {
    norm_row(qkv, weight, qkv, num_q, m->eps);
    norm_row(qkv + num_q, weight + num_q, qkv + num_q, num_k, m->eps);
  }
  for (int64_t h = 0; h < turned; h++) {
    float *head = qkv + h * dim;
    if (weight && !m->qk_whole) norm_row(head, weight + h * dim, head, dim, m->eps);
    float factor = h < m->heads ? m->scale : 1.0f;
    for (int64_t i = 0; i < half; i++) {
      float a = head[i], b = head[i + half];
      head[i] = (a * cos[i] + b * sin[i]) * factor;
      head[i + half] = (b * cos[i + half] + a * sin[i + half]) * factor;
    }
  }
  int64_t block = s->table[s->table_rows[row] * s->table_width + position / s->block_tokens];
  int64_t token = position % s->block_tokens;
  for (int64_t part = 0; part < 2; part++)
    for (int64_t h = 0; h < m->kv_heads; h++) {
      int64_t plane = (index * 2 + part) * s->num_blocks + block;
      float *at = s->kv + ((plane * m->kv_heads + h) * s->block_tokens + token) * dim;
      memcpy(at, qkv + (m->heads + part * m->kv_heads + h) * dim, sizeof(float) * dim);
    }
}

INLINE vec times(const int VECS, const float *q, const float *key) {
  vec sum = load(q) * load(key);
  UNROLL for (int v = 1; v < VECS; v++) sum += load(q + v * LANES) * load(key + v * LANES);
  return sum;
}

/* Scores of Q queries and the tokens of one block. */
INLINE void score_block(const int VECS, const int Q, const float *q, const float *keys, int64_t dim,
                        int64_t tokens, float *score, int64_t stride) {
  int64_t t = 0;
  for (; t + LANES <= tokens; t += LANES)
    for (int g = 0; g < Q; g++) {
      vec sum[LANES];
      UNROLL for (int i = 0; i < LANES; i++)
        sum[i] = times(VECS, q + g * dim, keys + (t + i) * dim);
      store(score + g * stride + t, sums_of(sum));
    }
  for (; t < tokens; t++)
    for (int g = 0; g < Q; g++)
      score[g * stride + t] = sum_of(times(VECS, q + g * dim, keys + t * dim));
}

INLINE void value_block(const int VECS, const int Q, const float *values, int64_t dim,
                        int64_t tokens, const float *weight, int64_t stride, vec *sum) {
  for (int64_t t = 0; t < tokens; t++)
    UNROLL for (int v = 0; v < VECS; v++) {
      vec value = load(values + t * dim + v * LANES);
      UNROLL for (int g = 0; g < Q; g++) sum[g * VECS + v] += value * weight[g * stride + t];
    }
}

/* Weights exp(score - peak), in place and padded with zeros to LANES; returns their sum. */
static float soften(float *score, int64_t count) {
  int64_t padded = (count + LANES - 1) / LANES * LANES;
  for (int64_t i = count; i < padded; i++) score[i] = -INFINITY;
  vec peaks = load(score);
  for (int64_t i = LANES; i < padded; i += LANES) {
    vec here = load(score + i);
    peaks = choose(here > peaks, here, peaks);
  }
  float lane[LANES], peak;
  store(lane, peaks);
  peak = lane[0];
  for (int i = 1; i < LANES; i++) peak = lane[i] > peak ? lane[i] : peak;
  vec total = {0};
  for (int64_t i = 0; i < padded; i += LANES) {
    vec weight = exp_of(load(score + i) - peak);
    store(score + i, weight);
    total += weight;
  }
  return sum_of(total);
}

/* Q query heads of one kv head over the tokens [begin, context) of the row. */
INLINE void attend_heads(const int VECS, const int Q, const Step *s, const float *q, int64_t dim,
                         int64_t kv_heads, int64_t head, const float *keys, const float *values,
                         const int64_t *blocks, int64_t begin, int64_t context, float *score,
                         float *out) {
  int64_t size = s->block_tokens, step = kv_heads * size * dim, stride = s->score_width / Q;
  int64_t first = begin / size * size;
  for (int64_t t = first; t < context; t += size) {
    int64_t skip = begin > t ? begin - t : 0, tokens = (context - t < size ? context - t : size) - skip;
    const float *at = keys + blocks[t / size] * step + (head * size + skip) * dim;
    score_block(VECS, Q, q, at, dim, tokens, score + t + skip - begin, stride);
  }
  float total[4];
  for (int g = 0; g < Q; g++) total[g] = soften(score + g * stride, context - begin);
  vec sum[16]; /* Q * VECS at most */
  UNROLL for (int i = 0; i < Q * VECS; i++) sum[i] = (vec){0};
  for (int64_t t = first; t < context; t += size) {
    int64_t skip = begin > t ? begin - t : 0, tokens = (context - t < size ? context - t : size) - skip;
    const float *at = values + blocks[t / size] * step + (head * size + skip) * dim;
    value_block(VECS, Q, at, dim, tokens, score + t + skip - begin, stride, sum);
  }
  UNROLL for (int g = 0; g < Q; g++)
    UNROLL for (int v = 0; v < VECS; v++)
      store(out + g * dim + v * LANES, sum[g * VECS + v] / total[g]);
}

#define HEADS(vecs, q)                                                                         \
  if (num_vecs == vecs && group - g >= q) {                                                    \
    attend_heads(vecs, q, s, query + g * dim, dim, m->kv_heads, h, keys, values, blocks,       \
                 begin, context, score, out + g * dim);                                        \
    g += q;                                                                                    \
    continue;                                                                                  \
  }

/* The heads of kv head `h` of one row. What stands in a group decides the order, nothing else. */
static void attend_row(const Model *m, const Step *s, int64_t index, int64_t row, int64_t h,
                       const float *qkv, float *score, float *result) {
  int64_t window = m->layers[index].window;
  int64_t dim = m->dim, group = m->heads / m->kv_heads, num_vecs = dim / LANES;
  int64_t plane = s->num_blocks * m->kv_heads * s->block_tokens * dim;
  const float *keys = s->kv + index * 2 * plane, *values = keys + plane;
  const int64_t *blocks = s->table + s->table_rows[row] * s->table_width;
  int64_t context = s->positions[row] + 1;
  int64_t begin = window && context > window ? context - window : 0;
  const float *query = qkv + h * group * dim;
  float *out = result + h * group * dim;
  for (int64_t g = 0; g < group;) {
    HEADS(1, 4) HEADS(1, 2) HEADS(1, 1)
    HEADS(2, 4) HEADS(2, 2) HEADS(2, 1)
    HEADS(4, 4) HEADS(4, 2) HEADS(4, 1)
    HEADS(8, 2) HEADS(8, 1)
    HEADS(16, 1)
    break; /* compiled.py admits no other head size */
  }
}

/* ---------------------------------------------------------------------------------- a step */

void dora_forward(const Model *m, const Step *s) {
  int64_t D = m->hidden, dim = m->dim, threads = s->threads;
  int64_t width = (m->heads + 2 * m->kv_heads) * dim, attended = m->heads * dim;
  float *x = s->x, *h = s->h, *wide = s->wide, *mixed = s->mixed;
  for (int64_t i = 0; i < s->num_segments; i++) {
    Segment seg = s->segments[i];
    const float *embed = m->embed + seg.slot * m->vocab * D;
    for (int64_t t = seg.start; t < seg.stop; t++) {
      if (m->tied)
        unpack_row(embed, m->vocab, D, s->token_ids[t], x + t * D);
      else
        memcpy(x + t * D, embed + s->token_ids[t] * D, sizeof(float) * D);
      if (m->embed_scale != 1.0f)
        for (int64_t i = 0; i < D; i++) x[t * D + i] *= m->embed_scale;
    }
  }
  for (int64_t index = 0; index < m->num_layers; index++) {
    const Layer *layer = m->layers + index;
    for (int64_t i = 0; i < s->num_segments; i++) {
      Segment seg = s->segments[i];
      int64_t slot = seg.slot;
      norm_rows(x + seg.start * D, layer->norm1 ? layer->norm1 + slot * D : 0, h + seg.start * D,
                seg.stop - seg.start, D, m->eps, threads);
      dora_linear(h + seg.start * D, D, seg.stop - seg.start, D, layer->qkv + slot * width * D,
                  layer->qkv_bias ? layer->qkv_bias + slot * width : 0, wide + seg.start * width,
                  width, 0, threads);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
      for (int64_t t = seg.start; t < seg.stop; t++)
        place_row(m, s, layer, index, slot, t, wide + t * width);
    }
    int64_t pairs = s->num_rows * m->kv_heads;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
    for (int64_t part = 0; part < threads; part++)
      for (int64_t p = part; p < pairs; p += threads) {
        int64_t t = p / m->kv_heads;
        attend_row(m, s, index, t, p % m->kv_heads, wide + t * width,
                   s->score + part * s->score_width, mixed + t * attended);
      }
    for (int64_t i = 0; i < s->num_segments; i++) {
      Segment seg = s->segments[i];
      int64_t slot = seg.slot, rows = seg.stop - seg.start, inner = m->inner;
      float *here = x + seg.start * D, *mid = wide + seg.start * 2 * inner;
      float *normed = h + seg.start * D;
      add_product(here, mixed + seg.start * attended, attended, rows, attended,
                  layer->o + slot * D * attended, layer->o_bias ? layer->o_bias + slot * D : 0,
                  layer->post1 ? layer->post1 + slot * D : 0, normed, D, m->eps, threads);
      norm_rows(here, layer->norm2 ? layer->norm2 + slot * D : 0, normed, rows, D, m->eps, threads);
      dora_linear(normed, D, rows, D, layer->gate_up + slot * 2 * inner * D,
                  layer->gate_up_bias ? layer->gate_up_bias + slot * 2 * inner : 0, mid, 2 * inner,
                  0, threads);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
      for (int64_t t = 0; t < rows; t++) {
        float *gate = mid + t * 2 * inner, *up = gate + inner;
        if (m->gelu)
          gate_row(1, gate, up, inner);
        else
          gate_row(0, gate, up, inner);
      }
      add_product(here, mid, 2 * inner, rows, inner, layer->down + slot * D * inner,
                  layer->down_bias ? layer->down_bias + slot * D : 0,
                  layer->post2 ? layer->post2 + slot * D : 0, normed, D, m->eps, threads);
    }
  }
  for (int64_t i = 0; i < s->num_segments; i++) {
    Segment seg = s->logit_segments[i];
    int64_t rows = seg.stop - seg.start;
    if (!rows) continue;
    for (int64_t r = 0; r < rows; r++)
      norm_row(x + s->logit_rows[seg.start + r] * D, m->norm + seg.slot * D, h + r * D, D, m->eps);
    dora_linear(h, D, rows, D, m->lm_head + seg.slot * m->vocab * D, 0,
                s->logits + seg.start * m->vocab, m->vocab, 0, threads);
  }
}

/* --------------------------------------------------------------------------------- drawing */

static float uniform(int64_t key, int64_t position) {
  uint64_t x = (uint64_t)key + (uint64_t)(position + 1) * 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  x ^= x >> 31;
  return (float)(x >> 40) * 0x1p-24f;
}

/* exp(logit * factor - peak) of each token, sums of CHUNK tokens, and the whole sum. */
static double weigh(const float *logits, int64_t vocab, float factor, float *peak, float *weight,
                    double *running) {
  int64_t padded = (vocab + CHUNK - 1) / CHUNK * CHUNK;
  float top = -INFINITY;
  for (int64_t i = 0; i < vocab; i++) {
    weight[i] = logits[i] * factor;
    top = weight[i] > top ? weight[i] : top;
  }
  for (int64_t i = vocab; i < padded; i++) weight[i] = -INFINITY;
  double total = 0;
  for (int64_t c = 0; c < padded / CHUNK; c++) {
    vec sum = {0};
    for (int64_t i = c * CHUNK; i < (c + 1) * CHUNK; i += LANES) {
      vec e = exp_of(load(weight + i) - top);
      store(weight + i, e);
      sum += e;
    }
    total += sum_of(sum);
    running[c] = total;
  }
  *peak = top;
  return total;
}

static int64_t pick(const float *weight, const double *running, int64_t vocab, double threshold) {
  int64_t chunks = (vocab + CHUNK - 1) / CHUNK, c = 0;
  while (c < chunks - 1 && running[c] <= threshold) c++;
  double sum = c ? running[c - 1] : 0;
  int64_t last = c * CHUNK, end = last + CHUNK < vocab ? last + CHUNK : vocab;
  for (int64_t i = c * CHUNK; i < end; i++) {
    if (!(weight[i] > 0)) continue;
    last = i; /* rounding may leave nothing above the threshold: then the last possible token */
    sum += weight[i];
    if (sum > threshold) break;
  }
  return last;
}

/* Draw (temperature > 0), take the best (0) or score (forced >= 0) one token for each row.
   `scratch` has room for the padded vocabulary as floats and its chunks as doubles. */
void dora_draw(const float *logits, int64_t rows, int64_t vocab, const int64_t *keys,
               const int64_t *positions, const float *temperature, const int64_t *forced,
               int64_t *token, float *logprob, float *raw, float *scratch, double *running) {
  for (int64_t r = 0; r < rows; r++) {
    const float *row = logits + r * vocab;
    float heat = temperature[r] > 0 ? temperature[r] : 1.0f, factor = 1.0f / heat, peak;
    double total = weigh(row, vocab, factor, &peak, scratch, running);
    int64_t chosen = forced[r];
    if (chosen < 0 && temperature[r] > 0)
      chosen = pick(scratch, running, vocab, (double)uniform(keys[r], positions[r]) * total);
    if (chosen < 0) {
      chosen = 0;
      for (int64_t i = 1; i < vocab; i++) chosen = row[i] > row[chosen] ? i : chosen;
    }
    token[r] = chosen;
    logprob[r] = row[chosen] * factor - (peak + (float)log(total));
    raw[r] = logprob[r];
    if (heat != 1.0f) {
      total = weigh(row, vocab, 1.0f, &peak, scratch, running);
      raw[r] = row[chosen] - (peak + (float)log(total));
    }
  }
}
