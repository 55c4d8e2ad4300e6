/* SIMD vectors of LANES numbers: AVX-512 with VNNI, AVX2 with FMA, or portable C. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(PORTABLE) && (defined(__AVX512F__) || defined(__AVX2__))
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if !defined(PORTABLE) && defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && \
    defined(__AVX512VNNI__)

#define SIMD_LEVEL 3
#define LANES 16
#define TILE_ROWS 6 /* rows of a tile: 6 x 4 accumulators, 4 weight vectors and one input use 29 of 32 registers */
#define ZERO_POINT 128 /* VPDPBUSD takes unsigned inputs, so inputs are shifted by 128 */
typedef __m512 floats;
typedef __m512i ints;

INLINE floats load(const float *from) { return _mm512_loadu_ps(from); }
INLINE void store(float *to, floats x) { _mm512_storeu_ps(to, x); }
INLINE floats load_partial(const float *from, int64_t count, float rest) { /* `count` numbers, then `rest` */
    return _mm512_mask_loadu_ps(_mm512_set1_ps(rest), count < LANES ? (__mmask16)((1u << count) - 1) : 0xFFFF, from);
}
INLINE floats broadcast(float x) { return _mm512_set1_ps(x); }
INLINE floats add(floats a, floats b) { return _mm512_add_ps(a, b); }
INLINE floats mul(floats a, floats b) { return _mm512_mul_ps(a, b); }
INLINE floats max_lanes(floats a, floats b) { return _mm512_max_ps(a, b); }
INLINE floats fma_lanes(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE float reduce_add(floats x) { return _mm512_reduce_add_ps(x); }
INLINE void reduce_add4(const floats x[4], float *to) { /* four sums at once: a third of the instructions */
    __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    __m512 all = _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xEE));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
INLINE float reduce_max(floats x) { return _mm512_reduce_max_ps(x); }
INLINE int any_above(floats x, float bound) { return _mm512_cmp_ps_mask(x, broadcast(bound), _CMP_GT_OQ) != 0; }
INLINE floats abs_lanes(floats x) { return _mm512_abs_ps(x); }
INLINE ints load_ints(const int32_t *from) { return _mm512_loadu_si512(from); }
INLINE ints zero_ints(void) { return _mm512_setzero_si512(); }
INLINE void int_reduce_add4(const ints x[4], int32_t *to) {
    __m512i low = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    __m512i high = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti32x8_epi32(all, 1));
    _mm_storeu_si128((__m128i *)to, _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}
INLINE floats to_floats(ints x) { return _mm512_cvtepi32_ps(x); }
INLINE ints load_weights(const int8_t *from) { return _mm512_loadu_si512(from); }
INLINE ints broadcast4(const uint8_t *from) {
    int32_t four;
    memcpy(&four, from, 4);
    return _mm512_set1_epi32(four);
}
INLINE ints dot4(ints sums, ints inputs, ints weights) {
    /* Inline assembly: with the intrinsic, gcc 12 spills the accumulators to the stack inside the loop. */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(inputs), "v"(weights));
    return sums;
}
INLINE void quantise_lanes(floats x, uint8_t *to) { /* round half to even */
    __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(ZERO_POINT));
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(whole));
}

#elif !defined(PORTABLE) && defined(__AVX2__) && defined(__FMA__)

#define SIMD_LEVEL 2
#define LANES 8
#define TILE_ROWS 2
#define ZERO_POINT 0
typedef __m256 floats;
typedef __m256i ints;

INLINE floats load(const float *from) { return _mm256_loadu_ps(from); }
INLINE void store(float *to, floats x) { _mm256_storeu_ps(to, x); }
INLINE floats broadcast(float x) { return _mm256_set1_ps(x); }
INLINE floats add(floats a, floats b) { return _mm256_add_ps(a, b); }
INLINE floats mul(floats a, floats b) { return _mm256_mul_ps(a, b); }
INLINE floats max_lanes(floats a, floats b) { return _mm256_max_ps(a, b); }
INLINE floats fma_lanes(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE float reduce_add(floats x) {
    float each[LANES], sum = 0;
    store(each, x);
    for (int lane = 0; lane < LANES; lane++) sum += each[lane];
    return sum;
}
INLINE float reduce_max(floats x) {
    float each[LANES];
    store(each, x);
    for (int lane = 1; lane < LANES; lane++) each[0] = each[lane] > each[0] ? each[lane] : each[0];
    return each[0];
}
INLINE floats abs_lanes(floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
INLINE ints load_ints(const int32_t *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE ints zero_ints(void) { return _mm256_setzero_si256(); }
INLINE int32_t int_reduce_add(ints x) {
    int32_t each[LANES], sum = 0;
    _mm256_storeu_si256((__m256i *)each, x);
    for (int lane = 0; lane < LANES; lane++) sum += each[lane];
    return sum;
}
INLINE floats to_floats(ints x) { return _mm256_cvtepi32_ps(x); }
INLINE ints load_weights(const int8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE ints broadcast4(const uint8_t *from) {
    int32_t four;
    memcpy(&four, from, 4);
    return _mm256_set1_epi32(four);
}
INLINE ints dot4(ints sums, ints inputs, ints weights) {
    /* |a| (sign(a) w): both are at most 127, so the sum of two products fits into 16 bits. */
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(inputs), _mm256_sign_epi8(weights, inputs));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE void quantise_lanes(floats x, uint8_t *to) {
    int32_t whole[LANES];
    _mm256_storeu_si256((__m256i *)whole, _mm256_cvtps_epi32(x));
    for (int lane = 0; lane < LANES; lane++) to[lane] = (uint8_t)(int8_t)whole[lane];
}

#else

#define SIMD_LEVEL 1
#define LANES 8
#define TILE_ROWS 2
#define ZERO_POINT 0
typedef struct { float at[LANES]; } floats;
typedef struct { int32_t at[LANES]; } ints;
#define EACH for (int lane = 0; lane < LANES; lane++)

INLINE floats load(const float *from) { floats x; EACH x.at[lane] = from[lane]; return x; }
INLINE void store(float *to, floats x) { EACH to[lane] = x.at[lane]; }
INLINE floats broadcast(float a) { floats x; EACH x.at[lane] = a; return x; }
INLINE floats add(floats a, floats b) { EACH a.at[lane] += b.at[lane]; return a; }
INLINE floats mul(floats a, floats b) { EACH a.at[lane] *= b.at[lane]; return a; }
INLINE floats max_lanes(floats a, floats b) { EACH a.at[lane] = a.at[lane] > b.at[lane] ? a.at[lane] : b.at[lane]; return a; }
INLINE floats fma_lanes(floats a, floats b, floats c) { EACH c.at[lane] += a.at[lane] * b.at[lane]; return c; }
INLINE float reduce_add(floats x) { float sum = 0; EACH sum += x.at[lane]; return sum; }
INLINE float reduce_max(floats x) { EACH x.at[0] = x.at[lane] > x.at[0] ? x.at[lane] : x.at[0]; return x.at[0]; }
INLINE floats abs_lanes(floats x) { EACH x.at[lane] = fabsf(x.at[lane]); return x; }
INLINE ints load_ints(const int32_t *from) { ints x; EACH x.at[lane] = from[lane]; return x; }
INLINE ints zero_ints(void) { ints x; EACH x.at[lane] = 0; return x; }
INLINE int32_t int_reduce_add(ints x) { int32_t sum = 0; EACH sum += x.at[lane]; return sum; }
INLINE floats to_floats(ints x) { floats y; EACH y.at[lane] = (float)x.at[lane]; return y; }
INLINE ints load_weights(const int8_t *from) { ints x; memcpy(x.at, from, sizeof x.at); return x; }
INLINE ints broadcast4(const uint8_t *from) { ints x; EACH memcpy(x.at + lane, from, 4); return x; }
INLINE ints dot4(ints sums, ints inputs, ints weights) {
    int8_t a[4 * LANES], w[4 * LANES];
    memcpy(a, inputs.at, sizeof a);
    memcpy(w, weights.at, sizeof w);
    EACH for (int one = 4 * lane; one < 4 * lane + 4; one++) sums.at[lane] += a[one] * w[one];
    return sums;
}
INLINE void quantise_lanes(floats x, uint8_t *to) { EACH to[lane] = (uint8_t)(int8_t)lrintf(x.at[lane]); }

#endif

#if SIMD_LEVEL < 3
INLINE floats load_partial(const float *from, int64_t count, float rest) {
    float each[LANES];
    for (int lane = 0; lane < LANES; lane++) each[lane] = lane < count ? from[lane] : rest;
    return load(each);
}
INLINE void reduce_add4(const floats x[4], float *to) {
    for (int one = 0; one < 4; one++) to[one] = reduce_add(x[one]);
}
INLINE void int_reduce_add4(const ints x[4], int32_t *to) {
    for (int one = 0; one < 4; one++) to[one] = int_reduce_add(x[one]);
}
#endif

/* e^x for x <= 0 in plain C that vectorises: 2^n (1 + ...), n = round(x / ln 2); relative error about 1e-7. */
INLINE float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    int32_t bits;
    memcpy(&bits, &n, 4);
    n -= 12582912.0f;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t power = (bits - 0x4B400000 + 127) << 23;
    float scale;
    memcpy(&scale, &power, 4);
    return p * scale;
}

/* e^x of a vector; 0 for very negative x. */
#if SIMD_LEVEL == 3
INLINE floats exp_lanes(floats x) {
    x = max_lanes(broadcast(-200.0f), x); /* e^-200 is 0 in fp32; -inf would give NaN below */
    floats n = _mm512_roundscale_ps(mul(x, broadcast(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    floats r = _mm512_fnmadd_ps(n, broadcast(0.693359375f), x);
    r = fma_lanes(n, broadcast(2.12194440e-4f), r);
    floats p = fma_lanes(broadcast(1.384360680e-3f), r, broadcast(8.374195729e-3f)); /* degree 6: error 2e-9 before rounding */
    p = fma_lanes(p, r, broadcast(4.166800473e-2f));
    p = fma_lanes(p, r, broadcast(1.666643080e-1f));
    p = fma_lanes(p, r, broadcast(4.999999419e-1f));
    p = fma_lanes(p, r, broadcast(1.0f));
    p = fma_lanes(p, r, broadcast(1.0f));
    return _mm512_scalef_ps(p, n);
}
#else
INLINE floats exp_lanes(floats x) {
    float each[LANES];
    store(each, x);
    for (int lane = 0; lane < LANES; lane++) each[lane] = each[lane] < -87.0f ? 0.0f : fast_exp(each[lane]);
    return load(each);
}
INLINE int any_above(floats x, float bound) { return reduce_max(x) > bound; }
#endif
