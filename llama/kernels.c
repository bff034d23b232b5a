/* Matrix products and decode attention on a CPU. llama/kernels.py compiles and calls this file.
 *
 * Vectors are those of GCC and Clang; intrinsics stand only where these have no operator.
 *
 * A row's product does not depend on the other rows or on the number of threads: each output is
 * summed over blocks of inputs, in one order. int8 products are equal to the bit on all instruction
 * sets, since their sums in a block are integers.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <pthread.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define HAS_AVX512 1
#define LANES 16
#define MAX_ROWS 6 /* of x in one pass over a tile of weights: as many as the registers hold */
#else
#if defined(__AVX2__) && defined(__FMA__)
#define HAS_AVX2 1
#define LANES 8
#else
#define LANES 4
#endif
#define MAX_ROWS 3
#endif

#define INLINE static inline __attribute__((always_inline))
#define TILE 4          /* outputs that are computed together */
#define BLOCK 1024      /* inputs whose int8 products are summed as integers */
#define BLOCK_F 512     /* inputs whose products are summed before they are added to the output */
#define SKEW 32         /* numbers between rows, which would else share the sets of the L1 cache */
#define STRIDE (BLOCK + SKEW)
#define X_BLOCK 96      /* rows of x that stay in the cache while weights stream past */
#define CHUNK 64        /* outputs that a thread takes at once; cache slots, in attention */
#define FEW 8           /* rows of x for which weights are multiplied as they come from memory */
#define LIMIT 16383     /* of x as integers: BLOCK * 127 * LIMIT fits into 32 bits */
#define SMALL (1 << 16) /* products below this many multiplications stay on one thread */

enum { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4 };

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec_u __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef int16_t svec __attribute__((vector_size(4 * LANES)));
typedef int16_t svec_u __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef int8_t bytes_u __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
typedef uint8_t codes_u __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
typedef uint16_t halves_u __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));

INLINE vec load(const float *p) { return *(const vec_u *)p; }

/* GNU's threads do not survive a fork. */
static int forked;
static void after_fork(void) { forked = 1; }
__attribute__((constructor)) static void on_load(void) { pthread_atfork(0, 0, after_fork); }

/* ---- Numbers of 16 bits ---- */

INLINE float from_bfloat16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE float from_float16(uint16_t h) {
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    float f;
    memcpy(&f, &bits, 4);
    f *= 0x1p112f; /* also right for subnormals */
    memcpy(&bits, &f, 4);
    bits |= sign | ((h & 0x7c00) == 0x7c00 ? 0x7f800000 : 0);
    memcpy(&f, &bits, 4);
    return f;
}

/* LANES numbers from p[j] on, as floats. */
INLINE vec load_as(int kind, const void *p, long j) {
    if (kind == FLOAT32) return load((const float *)p + j);
    const uint16_t *h = (const uint16_t *)p + j;
    if (kind == BFLOAT16) return (vec)(__builtin_convertvector(*(const halves_u *)h, uvec) << 16);
#if defined(HAS_AVX512)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)h));
#elif defined(HAS_AVX2) && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)h));
#else
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = from_float16(h[i]);
    return v;
#endif
}

INLINE float number(int kind, const void *p, long j) {
    if (kind == FLOAT32) return ((const float *)p)[j];
    uint16_t h = ((const uint16_t *)p)[j];
    return kind == BFLOAT16 ? from_bfloat16(h) : from_float16(h);
}

INLINE void to_floats(int kind, float *out, const void *p, long from, long count) {
    long j = 0;
    for (; j + LANES <= count; j += LANES) *(vec_u *)(out + j) = load_as(kind, p, from + j);
    for (; j < count; j++) out[j] = number(kind, p, from + j);
}

/* ---- Sums over the lanes of four vectors ---- */

#if defined(HAS_AVX512) || defined(HAS_AVX2)
#ifdef HAS_AVX512
INLINE __m256 half(vec v) {
    return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
}
INLINE __m256i ihalf(ivec v) {
    return _mm256_add_epi32(_mm512_castsi512_si256((__m512i)v),
                            _mm512_extracti64x4_epi64((__m512i)v, 1));
}
#else
INLINE __m256 half(vec v) { return (__m256)v; }
INLINE __m256i ihalf(ivec v) { return (__m256i)v; }
#endif
INLINE __m128 sum4(const vec *v) {
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(half(v[0]), half(v[1])),
                              _mm256_hadd_ps(half(v[2]), half(v[3])));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}
INLINE __m128 isum4(const ivec *v) {
    __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32(ihalf(v[0]), ihalf(v[1])),
                                  _mm256_hadd_epi32(ihalf(v[2]), ihalf(v[3])));
    return _mm_cvtepi32_ps(
        _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1)));
}
#else
typedef float sums __attribute__((vector_size(16)));
INLINE sums sum4(const vec *v) {
    sums s;
    for (int r = 0; r < 4; r++) s[r] = (v[r][0] + v[r][1]) + (v[r][2] + v[r][3]);
    return s;
}
INLINE sums isum4(const ivec *v) {
    sums s;
    for (int r = 0; r < 4; r++) s[r] = (float)(v[r][0] + v[r][1] + v[r][2] + v[r][3]);
    return s;
}
#endif

INLINE float sum(vec v) {
    vec four[4] = {v, v, v, v};
    return sum4(four)[0];
}

/* acc + a[2i] * b[2i] + a[2i + 1] * b[2i + 1] in each lane i; which lane does not matter. */
INLINE ivec dot_pairs(ivec acc, svec a, svec b) {
#if defined(HAS_AVX512) && defined(__AVX512VNNI__)
    return (ivec)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(HAS_AVX512)
    return acc + (ivec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(HAS_AVX2)
    return acc + (ivec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__aarch64__) && defined(__ARM_NEON)
    acc = (ivec)vmlal_s16((int32x4_t)acc, vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
    return (ivec)vmlal_high_s16((int32x4_t)acc, (int16x8_t)a, (int16x8_t)b);
#else
    for (int i = 0; i < LANES; i++) acc[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return acc;
#endif
}

typedef struct {
    int kind;
    const void *w;      /* (n, k); two int4 codes in a byte, see below */
    const void *scales; /* int8: float (n,); int4: bfloat16 scales (n, k / group), then zeros */
    long n, k, group;
} weights;

typedef struct {
    const float *floats;
    const int16_t *integers; /* for int8 and few rows of int4, padded with zeros */
    const float *scales;     /* (m,), of the integers */
    const float *group_sums; /* (m, k / group), of the integers */
    long m, stride;
} inputs;

/* ---- Products of M rows of x and TILE rows of w, `count` numbers of each ----
 * M is a constant wherever these are called, so that all sums stay in registers. */

INLINE void tile_floats(const int M, const int kind, const int in_place, const float *x,
                        long x_stride, const void *w, long w_stride, long count, float *y) {
    if (!in_place) w_stride = STRIDE;
    vec acc[MAX_ROWS][TILE] = {0};
    long j = 0;
    for (; j + LANES <= count; j += LANES) {
        vec b[TILE];
        for (int r = 0; r < TILE; r++) {
            long at = r * w_stride + j;
            b[r] = load_as(kind, w, at);
            if (in_place) __builtin_prefetch((const char *)w + (at + TILE * w_stride) * (kind ? 2 : 4));
        }
        for (int i = 0; i < M; i++) {
            vec a = load(x + i * x_stride + j);
            for (int r = 0; r < TILE; r++) acc[i][r] += a * b[r];
        }
    }
    for (int i = 0; i < M; i++) {
        *(__typeof__(sum4(acc[i])) *)(y + i * TILE) = sum4(acc[i]);
        for (long t = j; t < count; t++)
            for (int r = 0; r < TILE; r++)
                y[i * TILE + r] =
                    fmaf(x[i * x_stride + t], number(kind, w, r * w_stride + t), y[i * TILE + r]);
    }
}

/* w: int8 in place, or int16. */
INLINE void tile_int8(const int M, const int in_place, const int16_t *x, long x_stride,
                      const void *w, long w_stride, long count, float *y) {
    if (!in_place) w_stride = STRIDE;
    ivec acc[MAX_ROWS][TILE] = {0};
    long j = 0;
    for (; j + 2 * LANES <= count; j += 2 * LANES) {
        svec b[TILE];
        for (int r = 0; r < TILE; r++) {
            const int8_t *narrow = (const int8_t *)w + r * w_stride + j;
            if (in_place) b[r] = __builtin_convertvector(*(const bytes_u *)narrow, svec);
            else b[r] = *(const svec_u *)((const int16_t *)w + r * w_stride + j);
            if (in_place) __builtin_prefetch(narrow + TILE * w_stride);
        }
        for (int i = 0; i < M; i++) {
            svec a = *(const svec_u *)(x + i * x_stride + j);
            for (int r = 0; r < TILE; r++) acc[i][r] = dot_pairs(acc[i][r], a, b[r]);
        }
    }
    for (; j < count; j++) /* one number after the other, in the first lane */
        for (int i = 0; i < M; i++)
            for (int r = 0; r < TILE; r++)
                acc[i][r][0] += x[i * x_stride + j] * (in_place ? ((const int8_t *)w)[r * w_stride + j]
                                                  : ((const int16_t *)w)[r * w_stride + j]);
    for (int i = 0; i < M; i++)
        *(__typeof__(isum4(acc[i])) *)(y + i * TILE) = isum4(acc[i]);
}

/* A group of int4: its first half lies in the low bits of its bytes, its second half in the high.
 * A weight is code * scale + zero, so that its product is scale * sum(code * x) + zero * sum(x). */
INLINE void tile_int4(const int M, const inputs *in, long row, const weights *w, long first,
                      float *y) {
    long half_group = w->group / 2, n_groups = w->k / w->group, g = 0;
    const uint16_t *scales = (const uint16_t *)w->scales + first * n_groups;
    const uint16_t *zeros = scales + w->n * n_groups;
    const uint8_t *codes = (const uint8_t *)w->w + first * (w->k / 2);
    const int16_t *x = in->integers + row * in->stride;
    const float *sums = in->group_sums + row * n_groups;
    vec acc[MAX_ROWS][TILE] = {0};
    for (; g < n_groups; g++) {
        ivec products[MAX_ROWS][TILE] = {0};
        for (long j = 0; j < half_group; j += 2 * LANES) {
            const int16_t *a = x + g * w->group + j;
            for (int r = 0; r < TILE; r++) {
                const uint8_t *c = codes + r * (w->k / 2) + g * half_group + j;
                svec pair, low, high;
                __builtin_prefetch(c + TILE * (w->k / 2));
#if LANES > 8
                if (half_group < 2 * LANES) { /* both halves in one vector */
                    __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)c));
                    
                    pair = (svec)_mm512_inserti64x4(_mm512_castsi256_si512(v),
                                                    _mm256_srli_epi16(v, 4), 1);
                    low = pair & 15;
                    for (int i = 0; i < M; i++)
                        products[i][r] = dot_pairs(products[i][r],
                                                   *(const svec_u *)(a + i * in->stride), low);
                    continue;
                }
#endif
                pair = (svec)__builtin_convertvector(*(const codes_u *)c, svec);
                low = pair & 15, high = pair >> 4;
                for (int i = 0; i < M; i++) {
                    const int16_t *from = a + i * in->stride;
                    ivec p = dot_pairs(products[i][r], *(const svec_u *)from, low);
                    products[i][r] = dot_pairs(p, *(const svec_u *)(from + half_group), high);
                }
            }
        }
        for (int r = 0; r < TILE; r++) {
            float scale = from_bfloat16(scales[r * n_groups + g]);
            for (int i = 0; i < M; i++)
                acc[i][r] += __builtin_convertvector(products[i][r], vec) * scale;
        }
    }
    for (g = 0; g + LANES <= n_groups; g += LANES)
        for (int r = 0; r < TILE; r++) {
            vec z = load_as(BFLOAT16, zeros, r * n_groups + g);
            for (int i = 0; i < M; i++) acc[i][r] += z * load(sums + i * n_groups + g);
        }
    for (int i = 0; i < M; i++) {
        *(__typeof__(sum4(acc[i])) *)(y + i * TILE) = sum4(acc[i]);
        for (long t = g; t < n_groups; t++)
            for (int r = 0; r < TILE; r++)
                y[i * TILE + r] = fmaf(from_bfloat16(zeros[r * n_groups + t]),
                                       sums[i * n_groups + t], y[i * TILE + r]);
    }
}

/* A function of each number of rows. */
#if MAX_ROWS > 3
#define FOR_ROWS(m, CALL)                                                                          \
    switch (m) {                                                                                   \
    case 1: CALL(1); break;                                                                        \
    case 2: CALL(2); break;                                                                        \
    case 3: CALL(3); break;                                                                        \
    case 4: CALL(4); break;                                                                        \
    case 5: CALL(5); break;                                                                        \
    default: CALL(6);                                                                              \
    }
#else
#define FOR_ROWS(m, CALL)                                                                          \
    switch (m) {                                                                                   \
    case 1: CALL(1); break;                                                                        \
    case 2: CALL(2); break;                                                                        \
    default: CALL(3);                                                                              \
    }
#endif

static void rows_floats(int m, int kind, int in_place, const float *x, long x_stride, const void *w,
                        long w_stride, long count, float *y) {
#define FLOATS(M) tile_floats(M, FLOAT32, 0, x, x_stride, w, w_stride, count, y)
#define IN_PLACE_32(M) tile_floats(M, FLOAT32, 1, x, x_stride, w, w_stride, count, y)
#define IN_PLACE_BF(M) tile_floats(M, BFLOAT16, 1, x, x_stride, w, w_stride, count, y)
#define IN_PLACE_16(M) tile_floats(M, FLOAT16, 1, x, x_stride, w, w_stride, count, y)
    if (!in_place) FOR_ROWS(m, FLOATS)
    else if (kind == FLOAT32) FOR_ROWS(m, IN_PLACE_32)
    else if (kind == BFLOAT16) FOR_ROWS(m, IN_PLACE_BF)
    else FOR_ROWS(m, IN_PLACE_16)
}

static void rows_int8(int m, int in_place, const int16_t *x, long x_stride, const void *w,
                      long w_stride, long count, float *y) {
#define INTEGERS(M) tile_int8(M, 0, x, x_stride, w, w_stride, count, y)
#define IN_PLACE_8(M) tile_int8(M, 1, x, x_stride, w, w_stride, count, y)
    if (in_place) FOR_ROWS(m, IN_PLACE_8)
    else FOR_ROWS(m, INTEGERS)
}

static void rows_int4(int m, const inputs *in, long row, const weights *w, long first, float *y) {
#define INT4_ROWS(M) tile_int4(M, in, row, w, first, y)
    FOR_ROWS(m, INT4_ROWS)
}

INLINE void dequantize_int4(float *out, const weights *w, long row, long from, long count) {
    long group = w->group, half_group = group / 2, n_groups = w->k / group;
    const uint16_t *scales = (const uint16_t *)w->scales + row * n_groups;
    const uint16_t *zeros = scales + w->n * n_groups;
    const uint8_t *codes = (const uint8_t *)w->w + row * (w->k / 2);
    for (long g = from / group; g < (from + count) / group; g++, out += group) {
        const uint8_t *c = codes + g * half_group;
        float scale = from_bfloat16(scales[g]), zero = from_bfloat16(zeros[g]);
        for (long j = 0; j < half_group; j++) {
            out[j] = (float)(c[j] & 15) * scale + zero;
            out[half_group + j] = (float)(c[j] >> 4) * scale + zero;
        }
    }
}

/* A tile of w, from input `from` on, as floats or as 16-bit integers, STRIDE apart. */
static void widen_tile(float *out, const weights *w, long first, long valid, long from, long count) {
    for (long r = 0; r < TILE; r++) {
        long row = first + (r < valid ? r : valid - 1), at = row * w->k + from;
        if (w->kind == INT8) {
            int16_t *to = (int16_t *)out + r * STRIDE;
            for (long j = 0; j < count; j++) to[j] = ((const int8_t *)w->w)[at + j];
        } else if (w->kind == INT4) {
            dequantize_int4(out + r * STRIDE, w, row, from, count);
        } else {
            to_floats(w->kind, out + r * STRIDE, w->w, at, count);
        }
    }
}

/* x (k,) as integers, padded to `padded`, and their sums in groups; returns the factor that maps
 * them back. */
static float to_integers(int16_t *out, float *sums, const float *x, long k, long padded,
                         long group) {
    float largest = 0;
    int finite = 1;
    for (long j = 0; j < k; j++) {
        float a = fabsf(x[j]);
        finite &= a <= 3e38f;
        largest = a > largest ? a : largest;
    }
    float inverse = finite && largest > 1e-30f ? LIMIT / largest : 0;
    for (long j = 0; j < k; j++) out[j] = (int16_t)(int32_t)rintf(finite ? x[j] * inverse : 0);
    for (long j = k; j < padded; j++) out[j] = 0;
    for (long g = 0; sums && g < k / group; g++) {
        int32_t total = 0;
        for (long j = g * group; j < (g + 1) * group; j++) total += out[j];
        sums[g] = (float)total;
    }
    return finite ? largest / LIMIT : NAN;
}

/* Outputs from `low` to `high` of all rows. */
static void chunk(const weights *w, const inputs *in, float *y, long low, long high) {
    float buffer[TILE * STRIDE] __attribute__((aligned(64)));
    float found[MAX_ROWS * TILE] __attribute__((aligned(16)));
    int is_int = in->integers != 0, few = in->m <= FEW;
    long length = w->kind == INT8 ? BLOCK : is_int ? w->k : BLOCK_F;
    long n_blocks = (w->k + length - 1) / length, n_tiles = (high - low + TILE - 1) / TILE;
    for (long top = 0; top < in->m; top += X_BLOCK) {
        long bottom = top + X_BLOCK < in->m ? top + X_BLOCK : in->m;
        for (long step = 0; step < n_blocks * n_tiles; step++) {
            /* Few rows: along the weights as they lie. Many: along all outputs for each block. */
            long block = few ? step % n_blocks : step / n_tiles;
            long tile = few ? step / n_blocks : step % n_tiles;
            long from = block * length, first = low + tile * TILE;
            long count = w->k - from < length ? w->k - from : length;
            long valid = high - first < TILE ? high - first : TILE;
            int in_place = few && valid == TILE && (w->kind != INT4 || is_int);
            int size = w->kind == INT8 ? 1 : w->kind == FLOAT32 ? 4 : 2;
            const void *rows = (const char *)w->w + (first * w->k + from) * size;
            if (!in_place) {
                widen_tile(buffer, w, first, valid, from, count);
                rows = buffer;
            }
            for (long i = top; i < bottom; i += MAX_ROWS) {
                int now = bottom - i < MAX_ROWS ? (int)(bottom - i) : MAX_ROWS;
                long at = i * in->stride + from;
                if (w->kind == INT8)
                    rows_int8(now, in_place, in->integers + at, in->stride, rows, w->k, count, found);
                else if (is_int)
                    rows_int4(now, in, i, w, first, found);
                else
                    rows_floats(now, w->kind, in_place, in->floats + at, in->stride, rows, w->k,
                                count, found);
                for (long a = 0; a < now; a++) {
                    float *to = y + (i + a) * w->n + first;
                    for (long r = 0; r < valid; r++) {
                        float s = (block ? to[r] : 0) + found[a * TILE + r];
                        if (is_int && block == n_blocks - 1) s *= in->scales[i + a];
                        if (w->kind == INT8 && block == n_blocks - 1)
                            s *= ((const float *)w->scales)[first + r];
                        to[r] = s;
                    }
                }
            }
        }
    }
}

/* y (m, n) = x (m, k) times w (n, k). Returns 0, or 1 without memory. */
int llama_linear(const float *x, int kind, const void *w, const void *scales, float *y, long m,
                 long n, long k, long group, int threads) {
    int is_int = kind == INT8 ||
                 (kind == INT4 && m <= FEW && n % TILE == 0 && group >= 32 && group <= 64);
    int copy = is_int || m > FEW;
    long stride = copy ? (k + SKEW - 1) / SKEW * SKEW + SKEW : k, n_groups = group ? k / group : 0;
    weights weight = {kind, w, scales, n, k, group};
    char *memory = copy ? aligned_alloc(64, m * (stride * 4 + 64 + (n_groups * 4 + 63) / 64 * 64)) : 0;
    if (copy && !memory) return 1;
    int16_t *integers = (int16_t *)memory;
    float *floats = (float *)memory, *sums = floats + m * stride, *x_scales = sums + m * n_groups;
    inputs in = {copy ? floats : x, is_int ? integers : 0, x_scales, sums, m, stride};
    if (m * n * k < SMALL || forked) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (long i = 0; i < (copy ? m : 0); i++) {
            if (is_int)
                x_scales[i] = to_integers(integers + i * stride, group ? sums + i * n_groups : 0,
                                          x + i * k, k, stride, group);
            else
                memcpy(floats + i * stride, x + i * k, k * 4);
        }
#pragma omp for schedule(dynamic)
        for (long c = 0; c < (n + CHUNK - 1) / CHUNK; c++)
            chunk(&weight, &in, y, c * CHUNK, (c + 1) * CHUNK < n ? (c + 1) * CHUNK : n);
    }
    free(memory);
    return 0;
}

/* ---- Decode attention ---- */

typedef struct {
    int kind; /* of the cache */
    const void *k, *v;
    const uint16_t *scale_k, *scale_v; /* float16, of an int8 cache */
    long n_slots, n_kv_heads, head_dim;
} kv_cache;

/* A head in the cache as floats: in place, or in `buffer`. */
INLINE const float *head(float *buffer, const kv_cache *c, int is_v, long at) {
    const void *from = is_v ? c->v : c->k;
    long d = c->head_dim;
    if (c->kind == FLOAT32) return (const float *)from + at * d;
    if (c->kind == BFLOAT16) to_floats(BFLOAT16, buffer, from, at * d, d);
    if (c->kind == FLOAT16) to_floats(FLOAT16, buffer, from, at * d, d);
    if (c->kind == INT8) {
        const int8_t *q = (const int8_t *)from + at * d;
        float scale = from_float16((is_v ? c->scale_v : c->scale_k)[at]);
        for (long j = 0; j < d; j++) buffer[j] = q[j] * scale;
    }
    return buffer;
}

INLINE float dot(const float *a, const float *b, long n) {
    vec s = {0};
    long j = 0;
    for (; j + LANES <= n; j += LANES) s += load(a + j) * load(b + j);
    float total = sum(s);
    for (; j < n; j++) total += a[j] * b[j];
    return total;
}

/* exp(x) for x <= 0 or NaN, to 2 units in the last place: 2^n times a polynomial. */
INLINE float exp_negative(float x) {
    x = x < -87 ? -87 : x;
    float n = rintf(x * 1.44269504f), r = fmaf(n, -0.693145752f, x);
    r = fmaf(n, -1.42860677e-6f, r);
    float p = 1.98756915e-4f;
    p = fmaf(p, r, 1.39819995e-3f);
    p = fmaf(p, r, 8.33345192e-3f);
    p = fmaf(p, r, 4.16657962e-2f);
    p = fmaf(p, r, 1.66666656e-1f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r * r, r + 1);
    uint32_t bits = (uint32_t)((int32_t)(x == x ? n : 0) + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

/* Attention of one row's queries over the positions from `low` to `high`, less than CHUNK: for each
 * head the largest score, the sum of exponentials, and their sum over values. */
static void attend(const float *q, const kv_cache *c, long row, long low, long high, long rep,
                   float scale, float *scores, float *buffer, float *out) {
    long d = c->head_dim, heads = c->n_kv_heads * rep;
    for (long p = low; p < high; p++) {
        long at = (row * c->n_slots + p % c->n_slots) * c->n_kv_heads;
        for (long h = 0; h < c->n_kv_heads; h++) {
            const float *key = head(buffer, c, 0, at + h);
            for (long r = h * rep; r < (h + 1) * rep; r++)
                scores[r * CHUNK + p - low] = dot(q + r * d, key, d) * scale;
        }
    }
    for (long h = 0; h < heads; h++) {
        float *s = scores + h * CHUNK, largest = -INFINITY, total = 0, *to = out + h * (d + 2);
        for (long i = 0; i < high - low; i++) largest = s[i] > largest ? s[i] : largest;
        float from = largest == -INFINITY ? 0 : largest;
        for (long i = 0; i < high - low; i++) s[i] = exp_negative(s[i] - from);
        for (long i = 0; i < high - low; i++) total += s[i];
        memset(to, 0, 4 * (d + 2));
        to[d] = largest;
        to[d + 1] = total;
    }
    for (long p = low; p < high; p++) {
        long at = (row * c->n_slots + p % c->n_slots) * c->n_kv_heads;
        for (long h = 0; h < c->n_kv_heads; h++) {
            const float *value = head(buffer, c, 1, at + h);
            for (long r = h * rep; r < (h + 1) * rep; r++) {
                float weight = scores[r * CHUNK + p - low], *to = out + r * (d + 2);
                for (long j = 0; j < d; j++) to[j] += weight * value[j];
            }
        }
    }
}

/* q (bsz, heads, head_dim) over rows first_row on of a cache (rows, n_slots, n_kv_heads, head_dim).
 * Row i has filled its slots up to position positions[i], and sees `window` of them (0: all) that
 * lie in its first kv_len slots. Returns 0, or 1 without memory. */
int llama_attention(const float *q, int kind, const void *k, const void *v, const void *scale_k,
                    const void *scale_v, float *y, const int64_t *positions, long bsz, long heads,
                    long n_slots, long n_kv_heads, long head_dim, long first_row, long kv_len,
                    long window, int threads) {
    kv_cache cache = {kind, k, v, scale_k, scale_v, n_slots, n_kv_heads, head_dim};
    long size = heads * (head_dim + 2), most = 0, rep = heads / n_kv_heads;
    long span = window && window < n_slots ? window : n_slots;
    long (*range)[2] = malloc(bsz * sizeof *range);
    if (!range) return 1;
    for (long b = 0; b < bsz; b++) {
        long end = positions[b] + 1, low = end > span ? end - span : 0;
        if (kv_len < n_slots && end > kv_len) end = kv_len; /* an inactive row */
        range[b][0] = low < end ? low : end - 1;
        range[b][1] = end;
        /* Chunks begin at multiples of CHUNK: where they do must not depend on other rows. */
        long n = (end - 1) / CHUNK - range[b][0] / CHUNK + 1;
        most = n > most ? n : most;
    }
    float *parts = malloc(bsz * most * size * 4);
    if (!parts) {
        free(range);
        return 1;
    }
    int failed = 0;
    float scale = 1 / sqrtf((float)head_dim);
    if (bsz * most < 2 || forked) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *scratch = malloc((heads * CHUNK + head_dim) * 4);
        if (!scratch) failed = 1;
#pragma omp for schedule(dynamic)
        for (long i = 0; i < bsz * most; i++) {
            long b = i / most, at = range[b][0] / CHUNK + i % most;
            long low = at * CHUNK, high = low + CHUNK;
            if (low < range[b][0]) low = range[b][0];
            if (high > range[b][1]) high = range[b][1];
            if (low < high && scratch)
                attend(q + b * heads * head_dim, &cache, first_row + b, low, high, rep, scale,
                       scratch, scratch + heads * CHUNK, parts + i * size);
        }
#pragma omp for
        for (long h = 0; h < bsz * heads; h++) {
            long b = h / heads, n = (range[b][1] - 1) / CHUNK - range[b][0] / CHUNK + 1;
            const float *part = parts + b * most * size + h % heads * (head_dim + 2);
            float largest = -INFINITY, total = 0, *to = y + h * head_dim;
            for (long i = 0; i < n; i++)
                largest = fmaxf(largest, part[i * size + head_dim]);
            memset(to, 0, head_dim * 4);
            for (long i = 0; i < n; i++) {
                const float *from = part + i * size;
                if (from[head_dim] == -INFINITY && from[head_dim + 1] == from[head_dim + 1] &&
                    largest != -INFINITY)
                    continue;
                float share = largest == -INFINITY ? NAN : exp_negative(from[head_dim] - largest);
                total += share * from[head_dim + 1];
                for (long j = 0; j < head_dim; j++) to[j] += share * from[j];
            }
            for (long j = 0; j < head_dim; j++) to[j] /= total;
        }
        free(scratch);
    }
    free(parts);
    free(range);
    return failed;
}

/* Run once, in a process of its own, by whoever has compiled this file: a library for another CPU
 * ends there. */
int llama_self_test(void) {
    static float x[9 * 96], w[5 * 96], y[9 * 5], scales[5 * 6];
    for (int i = 0; i < 9 * 96; i++) x[i] = 1;
    for (int i = 0; i < 5; i++) scales[i] = 1;
    for (int kind = FLOAT32; kind <= INT4; kind++)
        for (long m = 1; m <= 9; m += 4)
            if (llama_linear(x, kind, w, scales, y, m, 5, 96, 32, 2)) return 1;
    int64_t position = 11;
    if (llama_attention(x, FLOAT32, x, x, 0, 0, y, &position, 1, 2, 12, 1, 16, 0, 12, 0, 2))
        return 1;
    return y[0] > 0.99f && y[0] < 1.01f ? 0 : 1;
}
