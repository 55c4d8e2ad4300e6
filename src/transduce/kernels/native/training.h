/* What training on a CPU does to every number of large tensors: cross-entropy of scores, dropout, and
   scores of additive attention.
   Numbers are fp32 or, where `narrow`, the upper half of it (bf16); sums are always fp32. */

INLINE float at(const void *x, int64_t i, int narrow) {
    if (!narrow) return ((const float *)x)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)x)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE void put(void *y, int64_t i, float value, int narrow) {
    if (!narrow) {
        ((float *)y)[i] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, 4);
    ((uint16_t *)y)[i] = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16); /* to the nearest, even in a tie */
}

/* log sum exp of a row, and its mean. */
INLINE void read_row(const void *x, int64_t size, int narrow, float *sum, float *mean) {
    float most = -INFINITY, all = 0, powers = 0;
#pragma omp simd reduction(max : most) reduction(+ : all)
    for (int64_t i = 0; i < size; i++) {
        float value = at(x, i, narrow);
        most = value > most ? value : most;
        all += value;
    }
#pragma omp simd reduction(+ : powers)
    for (int64_t i = 0; i < size; i++) powers += fast_exp(at(x, i, narrow) - most);
    *sum = most + logf(powers);
    *mean = all / (float)size;
}

/* Rows of scores, `stride` apart, and the right one of each (below 0: padding, which counts nothing) in; log sum exp,
   the loss of the right one and that of all alike out. */
void transduce_read_rows(const void *scores, int64_t narrow, int64_t rows, int64_t size, int64_t stride,
                         const int64_t *gold, float *sums, float *plain, float *smooth, int64_t threads) {
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const char *x = (const char *)scores + row * stride * (narrow ? 2 : 4);
        float mean;
        sums[row] = plain[row] = smooth[row] = 0;
        if (gold[row] < 0) continue;
        if (narrow) read_row(x, size, 1, sums + row, &mean);
        else read_row(x, size, 0, sums + row, &mean);
        plain[row] = sums[row] - at(x, gold[row], narrow != 0);
        smooth[row] = sums[row] - mean;
    }
}

INLINE void write_row(const void *x, int64_t size, int narrow, float sum, float even, float slope, void *y) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++) put(y, i, (fast_exp(at(x, i, narrow) - sum) - even) * slope, narrow);
}

/* d loss / d x_j = (p_j - (1 - eps) [j = gold] - eps / V) slope, in rows that lie side by side, perhaps over the scores. */
void transduce_write_rows(const void *scores, int64_t narrow, int64_t rows, int64_t size, int64_t stride,
                          const int64_t *gold, const float *sums, const float *slope, double eps, void *result,
                          int64_t threads) {
    float even = (float)(eps / (double)size), right = (float)(1 - eps);
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        int64_t bytes = narrow ? 2 : 4, one = gold[row];
        const char *x = (const char *)scores + row * stride * bytes;
        char *y = (char *)result + row * size * bytes;
        if (one < 0) {
            memset(y, 0, size * bytes);
            continue;
        }
        float score = fast_exp(at(x, one, narrow != 0) - sums[row]); /* first: the result may lie where the scores do */
        if (narrow) write_row(x, size, 1, sums[row], even, *slope, y);
        else write_row(x, size, 0, sums[row], even, *slope, y);
        put(y, one, (score - even - right) * *slope, narrow != 0);
    }
}

/* 32 bits that look drawn, from a number and two keys: rounds of shifts and odd factors, each one to one. */
INLINE uint32_t drawn(uint32_t x, uint32_t one, uint32_t other) {
    x = (x ^ one) * 0x9E3779B1u;
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x = (x + other) * 0x846CA68Bu;
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    return x ^ (x >> 15);
}

INLINE void drop(const float *values, const void *x, int narrow, int64_t from, int64_t to, const int64_t *seed,
                 double rate, void *y, int narrow_y, int adds) {
    uint32_t one = (uint32_t)seed[0], other = (uint32_t)(seed[0] >> 32), limit = (uint32_t)(rate * 4294967296.0);
    float scale = (float)(1 / (1 - rate));
#pragma omp simd
    for (int64_t i = from; i < to; i++) {
        float kept = drawn((uint32_t)i, one, other) >= limit ? at(x, i, narrow) * scale : 0.0f;
        put(y, i, adds ? values[i] + kept : kept, narrow_y);
    }
}

/* y = values + dropout(x), or dropout(x) alone where there are no values. The same seed leaves out the same. */
void transduce_drop(const float *values, const void *x, int64_t narrow, int64_t count, const int64_t *seed, double rate,
                    void *y, int64_t narrow_y, int64_t threads) {
    int64_t part = (count + threads - 1) / threads;
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t number = 0; number < threads; number++) {
        int64_t from = number * part, to = from + part < count ? from + part : count;
        if (values && narrow) drop(values, x, 1, from, to, seed, rate, y, 0, 1);
        else if (values) drop(values, x, 0, from, to, seed, rate, y, 0, 1);
        else if (narrow && narrow_y) drop(values, x, 1, from, to, seed, rate, y, 1, 0);
        else if (narrow_y) drop(values, x, 0, from, to, seed, rate, y, 1, 0);
        else if (narrow) drop(values, x, 1, from, to, seed, rate, y, 0, 0);
        else drop(values, x, 0, from, to, seed, rate, y, 0, 0);
    }
}

INLINE float hyperbolic(float x) { /* tanh */
    float power = fast_exp(-2 * fabsf(x));
    return copysignf((1 - power) / (1 + power), x);
}

/* One source: e_ns = v . tanh(q_n + k_s). */
INLINE void meet_one(const void *query, const void *keys, const float *vector, int narrow, int64_t steps, int64_t rows,
                     int64_t width, float *scores) {
    for (int64_t n = 0; n < steps; n++)
        for (int64_t s = 0; s < rows; s++) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < width; i++)
                sum += vector[i] * hyperbolic(at(query, n * width + i, narrow) + at(keys, s * width + i, narrow));
            scores[n * rows + s] = sum;
        }
}

/* Queries (B N Q), keys (B S Q) and a vector (Q) in, scores (B N S) out. */
void transduce_meet(const void *query, const void *keys, const float *vector, int64_t narrow, int64_t sources,
                    int64_t steps, int64_t rows, int64_t width, float *scores, int64_t threads) {
    int64_t bytes = narrow ? 2 : 4;
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t b = 0; b < sources; b++) {
        const char *q = (const char *)query + b * steps * width * bytes, *k = (const char *)keys + b * rows * width * bytes;
        if (narrow) meet_one(q, k, vector, 1, steps, rows, width, scores + b * steps * rows);
        else meet_one(q, k, vector, 0, steps, rows, width, scores + b * steps * rows);
    }
}

INLINE void part_one(const void *query, const void *keys, const float *vector, int narrow, int64_t steps, int64_t rows,
                     int64_t width, const float *slopes, float *for_query, float *for_keys, float *for_vector) {
    for (int64_t n = 0; n < steps; n++)
        for (int64_t s = 0; s < rows; s++) {
            float slope = slopes[n * rows + s], *dq = for_query + n * width, *dk = for_keys + s * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                float t = hyperbolic(at(query, n * width + i, narrow) + at(keys, s * width + i, narrow));
                float inner = slope * vector[i] * (1 - t * t);
                dq[i] += inner, dk[i] += inner, for_vector[i] += slope * t;
            }
        }
}

/* The gradients of the same, in fp32 and added to what is there: B N Q, B S Q and, one for each source, B Q. */
void transduce_part(const void *query, const void *keys, const float *vector, int64_t narrow, int64_t sources,
                    int64_t steps, int64_t rows, int64_t width, const float *slopes, float *for_query, float *for_keys,
                    float *for_vector, int64_t threads) {
    int64_t bytes = narrow ? 2 : 4;
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t b = 0; b < sources; b++) {
        const char *q = (const char *)query + b * steps * width * bytes, *k = (const char *)keys + b * rows * width * bytes;
        const float *g = slopes + b * steps * rows;
        float *dq = for_query + b * steps * width, *dk = for_keys + b * rows * width, *dv = for_vector + b * width;
        if (narrow) part_one(q, k, vector, 1, steps, rows, width, g, dq, dk, dv);
        else part_one(q, k, vector, 0, steps, rows, width, g, dq, dk, dv);
    }
}
