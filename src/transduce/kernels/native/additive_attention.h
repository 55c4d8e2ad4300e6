/* Additive attention: scores alone, or scores, softmax and context of a source together, forward and backward. */

/* One source: e_ns = v . tanh(q_n + k_s). */
INLINE void source_scores(const void *query, const void *keys, const float *vector, int bf16, int64_t queries,
                          int64_t length, int64_t width, float *scores) {
    for (int64_t n = 0; n < queries; n++)
        for (int64_t s = 0; s < length; s++) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < width; i++)
                sum += vector[i] * fast_tanh(read_element(query, n * width + i, bf16) +
                                             read_element(keys, s * width + i, bf16));
            scores[n * length + s] = sum;
        }
}

/* Scores (B N S) of queries (B N Q) and keys (B S Q) with a vector (Q). */
void transduce_additive_scores_forward(const void *query, const void *keys, const float *vector, int64_t bf16,
                                       int64_t sources, int64_t queries, int64_t length, int64_t width, float *scores,
                                       int64_t threads) {
    int64_t bytes = bf16 ? 2 : 4;
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t b = 0; b < sources; b++) {
        const char *q = (const char *)query + b * queries * width * bytes;
        const char *k = (const char *)keys + b * length * width * bytes;
        if (bf16) source_scores(q, k, vector, 1, queries, length, width, scores + b * queries * length);
        else source_scores(q, k, vector, 0, queries, length, width, scores + b * queries * length);
    }
}

INLINE void source_scores_gradient(const void *query, const void *keys, const float *vector, int bf16, int64_t queries,
                                   int64_t length, int64_t width, const float *grad, float *query_grad,
                                   float *keys_grad, float *vector_grad) {
    for (int64_t n = 0; n < queries; n++)
        for (int64_t s = 0; s < length; s++) {
            float score_grad = grad[n * length + s], *dq = query_grad + n * width, *dk = keys_grad + s * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                float t = fast_tanh(read_element(query, n * width + i, bf16) + read_element(keys, s * width + i, bf16));
                float inner = score_grad * vector[i] * (1 - t * t);
                dq[i] += inner, dk[i] += inner, vector_grad[i] += score_grad * t;
            }
        }
}

/* The gradients of queries, keys and, one for each source, of the vector (B Q), in fp32: added to the results. */
void transduce_additive_scores_backward(const void *query, const void *keys, const float *vector, int64_t bf16,
                                        int64_t sources, int64_t queries, int64_t length, int64_t width,
                                        const float *grad, float *query_grad, float *keys_grad, float *vector_grad,
                                        int64_t threads) {
    int64_t bytes = bf16 ? 2 : 4;
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t b = 0; b < sources; b++) {
        const char *q = (const char *)query + b * queries * width * bytes;
        const char *k = (const char *)keys + b * length * width * bytes;
        const float *g = grad + b * queries * length;
        float *dq = query_grad + b * queries * width, *dk = keys_grad + b * length * width;
        float *dv = vector_grad + b * width;
        if (bf16) source_scores_gradient(q, k, vector, 1, queries, length, width, g, dq, dk, dv);
        else source_scores_gradient(q, k, vector, 0, queries, length, width, g, dq, dk, dv);
    }
}

typedef struct {
    const void *query, *keys, *values, *grad; /* B N Q, B S Q, B S D; grad: of the context, B N D */
    const float *vector;                      /* Q */
    const uint8_t *mask;                      /* B S; NULL: no mask */
    float *weights;                           /* B N S: written by the forward pass, read by the backward pass */
    void *context, *query_grad, *keys_grad, *values_grad;
    float *vector_grad; /* B Q */
    int64_t sources, queries, length, width, value_width, mask_stride, bf16, bf16_values, threads;
} AdditiveAttention;

INLINE void source_context(const AdditiveAttention *a, int64_t b, const int bf16, const int bf16_values, float *sums) {
    int64_t length = a->length, width = a->width, depth = a->value_width;
    const void *q = a->query, *k = a->keys, *h = a->values; /* local names: loops over members are not vectorised */
    const float *v = a->vector;
    void *to = a->context;
    const uint8_t *mask = a->mask ? a->mask + b * a->mask_stride : NULL;
    for (int64_t n = 0; n < a->queries; n++) {
        int64_t row = b * a->queries + n;
        float *weights = a->weights + row * length, largest_score = -INFINITY, total = 0;
        for (int64_t s = 0; s < length; s++) {
            float sum = 0;
            if (!mask || mask[s]) {
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < width; i++)
                    sum += v[i] * fast_tanh(read_element(q, row * width + i, bf16) +
                                            read_element(k, (b * length + s) * width + i, bf16));
            } else sum = -INFINITY;
            weights[s] = sum;
            largest_score = sum > largest_score ? sum : largest_score;
        }
        for (int64_t s = 0; s < length; s++) {
            weights[s] = weights[s] == -INFINITY ? 0.0f : fast_exp(weights[s] - largest_score);
            total += weights[s];
        }
        memset(sums, 0, depth * 4);
        for (int64_t s = 0; s < length; s++) {
            float weight = weights[s] /= total;
#pragma omp simd
            for (int64_t i = 0; i < depth; i++)
                sums[i] += weight * read_element(h, (b * length + s) * depth + i, bf16_values);
        }
#pragma omp simd
        for (int64_t i = 0; i < depth; i++) write_element(to, row * depth + i, sums[i], bf16);
    }
}

/* dw_s = h_s . dc, de_s = w_s (dw_s - sum w dw); then as `source_scores_gradient`. Keys and values are written once. */
INLINE void source_context_gradient(const AdditiveAttention *a, int64_t b, const int bf16, const int bf16_values,
                                    float *scratch) {
    int64_t length = a->length, width = a->width, depth = a->value_width, queries = a->queries;
    float *score_grads = scratch, *dq = score_grads + queries * length, *dk = dq + queries * width, *dh = dk + width;
    float *dv = a->vector_grad + b * width;
    const void *q = a->query, *k = a->keys, *h = a->values, *g = a->grad;
    void *query_grad = a->query_grad, *keys_grad = a->keys_grad, *values_grad = a->values_grad;
    const float *v = a->vector;
    for (int64_t n = 0; n < queries; n++) {
        int64_t row = b * queries + n;
        const float *weights = a->weights + row * length;
        float mean = 0;
        for (int64_t s = 0; s < length; s++) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < depth; i++)
                sum += read_element(g, row * depth + i, bf16) *
                       read_element(h, (b * length + s) * depth + i, bf16_values);
            score_grads[n * length + s] = sum;
            mean += sum * weights[s];
        }
        for (int64_t s = 0; s < length; s++)
            score_grads[n * length + s] = weights[s] * (score_grads[n * length + s] - mean);
    }
    memset(dq, 0, queries * width * 4);
    memset(dv, 0, width * 4);
    for (int64_t s = 0; s < length; s++) {
        memset(dk, 0, (width + depth) * 4);
        for (int64_t n = 0; n < queries; n++) {
            int64_t row = b * queries + n;
            float score_grad = score_grads[n * length + s], weight = a->weights[row * length + s], *to = dq + n * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                float t = fast_tanh(read_element(q, row * width + i, bf16) +
                                    read_element(k, (b * length + s) * width + i, bf16));
                float part = score_grad * v[i] * (1 - t * t);
                to[i] += part, dk[i] += part, dv[i] += score_grad * t;
            }
#pragma omp simd
            for (int64_t i = 0; i < depth; i++) dh[i] += weight * read_element(g, row * depth + i, bf16);
        }
#pragma omp simd
        for (int64_t i = 0; i < width; i++) write_element(keys_grad, (b * length + s) * width + i, dk[i], bf16);
#pragma omp simd
        for (int64_t i = 0; i < depth; i++)
            write_element(values_grad, (b * length + s) * depth + i, dh[i], bf16_values);
    }
#pragma omp simd
    for (int64_t i = 0; i < queries * width; i++) write_element(query_grad, b * queries * width + i, dq[i], bf16);
}

static int64_t for_each_source(const AdditiveAttention *a, int backward) {
    int64_t failed = 0, numbers = a->queries * (a->length + a->width) + a->width + a->value_width;
#pragma omp parallel for if (a->threads > 1) num_threads(a->threads) reduction(+ : failed)
    for (int64_t b = 0; b < a->sources; b++) {
        float *scratch = malloc(numbers * 4);
        failed += !scratch;
        if (!scratch) continue;
        if (backward && a->bf16 && a->bf16_values) source_context_gradient(a, b, 1, 1, scratch);
        else if (backward && a->bf16) source_context_gradient(a, b, 1, 0, scratch);
        else if (backward) source_context_gradient(a, b, 0, 0, scratch);
        else if (a->bf16 && a->bf16_values) source_context(a, b, 1, 1, scratch);
        else if (a->bf16) source_context(a, b, 1, 0, scratch);
        else source_context(a, b, 0, 0, scratch);
        free(scratch);
    }
    return failed;
}

/* Nonzero: out of memory. */
int64_t transduce_additive_context_forward(const AdditiveAttention *a) { return for_each_source(a, 0); }
int64_t transduce_additive_context_backward(const AdditiveAttention *a) { return for_each_source(a, 1); }
