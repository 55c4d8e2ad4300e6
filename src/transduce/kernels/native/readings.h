/* Queries, keys and values of additive attention in, contexts out, and the gradients of all: scores, softmax and mean of a
   source in one go. Numbers are fp32 or bf16, sums fp32. */

typedef struct {
    const void *query, *keys, *values, *slopes; /* B N Q, B S Q, B S D, and of the contexts B N D */
    const float *vector;                        /* Q */
    const uint8_t *seen;                        /* B S; NULL: all */
    float *weights;                             /* B N S: written on the way there, read on the way back */
    void *contexts, *for_query, *for_keys, *for_values;
    float *for_vector; /* B Q */
    int64_t sources, steps, slots, width, value_width, seen_row, narrow, narrow_values, threads;
} Reading;

INLINE void read_source(const Reading *r, int64_t b, const int narrow, const int narrow_values, float *sums) {
    int64_t slots = r->slots, width = r->width, depth = r->value_width;
    const void *q = r->query, *k = r->keys, *h = r->values; /* by name here: loops over members are not vectorised */
    const float *v = r->vector;
    void *to = r->contexts;
    const uint8_t *seen = r->seen ? r->seen + b * r->seen_row : NULL;
    for (int64_t n = 0; n < r->steps; n++) {
        int64_t row = b * r->steps + n;
        float *weights = r->weights + row * slots, most = -INFINITY, all = 0;
        for (int64_t s = 0; s < slots; s++) {
            float sum = 0;
            if (!seen || seen[s]) {
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < width; i++)
                    sum += v[i] * hyperbolic(at(q, row * width + i, narrow) + at(k, (b * slots + s) * width + i, narrow));
            } else sum = -INFINITY;
            weights[s] = sum;
            most = sum > most ? sum : most;
        }
        for (int64_t s = 0; s < slots; s++) {
            weights[s] = weights[s] == -INFINITY ? 0.0f : fast_exp(weights[s] - most);
            all += weights[s];
        }
        memset(sums, 0, depth * 4);
        for (int64_t s = 0; s < slots; s++) {
            float weight = weights[s] /= all;
#pragma omp simd
            for (int64_t i = 0; i < depth; i++) sums[i] += weight * at(h, (b * slots + s) * depth + i, narrow_values);
        }
#pragma omp simd
        for (int64_t i = 0; i < depth; i++) put(to, row * depth + i, sums[i], narrow);
    }
}

/* dw_s = h_s . dc, de_s = w_s (dw_s - sum w dw); then as `part_one`, each key and value written once. */
INLINE void slope_source(const Reading *r, int64_t b, const int narrow, const int narrow_values, float *scratch) {
    int64_t slots = r->slots, width = r->width, depth = r->value_width, steps = r->steps;
    float *inner = scratch, *dq = inner + steps * slots, *dk = dq + steps * width, *dh = dk + width;
    float *dv = r->for_vector + b * width;
    const void *q = r->query, *k = r->keys, *h = r->values, *g = r->slopes;
    void *for_query = r->for_query, *for_keys = r->for_keys, *for_values = r->for_values;
    const float *v = r->vector;
    for (int64_t n = 0; n < steps; n++) {
        int64_t row = b * steps + n;
        const float *weights = r->weights + row * slots;
        float mean = 0;
        for (int64_t s = 0; s < slots; s++) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < depth; i++)
                sum += at(g, row * depth + i, narrow) * at(h, (b * slots + s) * depth + i, narrow_values);
            inner[n * slots + s] = sum;
            mean += sum * weights[s];
        }
        for (int64_t s = 0; s < slots; s++) inner[n * slots + s] = weights[s] * (inner[n * slots + s] - mean);
    }
    memset(dq, 0, steps * width * 4);
    memset(dv, 0, width * 4);
    for (int64_t s = 0; s < slots; s++) {
        memset(dk, 0, (width + depth) * 4);
        for (int64_t n = 0; n < steps; n++) {
            int64_t row = b * steps + n;
            float slope = inner[n * slots + s], weight = r->weights[row * slots + s], *to = dq + n * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                float t = hyperbolic(at(q, row * width + i, narrow) + at(k, (b * slots + s) * width + i, narrow));
                float part = slope * v[i] * (1 - t * t);
                to[i] += part, dk[i] += part, dv[i] += slope * t;
            }
#pragma omp simd
            for (int64_t i = 0; i < depth; i++) dh[i] += weight * at(g, row * depth + i, narrow);
        }
#pragma omp simd
        for (int64_t i = 0; i < width; i++) put(for_keys, (b * slots + s) * width + i, dk[i], narrow);
#pragma omp simd
        for (int64_t i = 0; i < depth; i++) put(for_values, (b * slots + s) * depth + i, dh[i], narrow_values);
    }
#pragma omp simd
    for (int64_t i = 0; i < steps * width; i++) put(for_query, b * steps * width + i, dq[i], narrow);
}

static int64_t each_source(const Reading *r, int backward) {
    int64_t failed = 0, numbers = r->steps * (r->slots + r->width) + r->width + r->value_width;
#pragma omp parallel for if (r->threads > 1) num_threads(r->threads) reduction(+ : failed)
    for (int64_t b = 0; b < r->sources; b++) {
        float *scratch = malloc(numbers * 4);
        failed += !scratch;
        if (!scratch) continue;
        if (backward && r->narrow && r->narrow_values) slope_source(r, b, 1, 1, scratch);
        else if (backward && r->narrow) slope_source(r, b, 1, 0, scratch);
        else if (backward) slope_source(r, b, 0, 0, scratch);
        else if (r->narrow && r->narrow_values) read_source(r, b, 1, 1, scratch);
        else if (r->narrow) read_source(r, b, 1, 0, scratch);
        else read_source(r, b, 0, 0, scratch);
        free(scratch);
    }
    return failed;
}

/* Nonzero: no memory. */
int64_t transduce_read_memory(const Reading *r) { return each_source(r, 0); }
int64_t transduce_read_memory_slopes(const Reading *r) { return each_source(r, 1); }
