/* Cross-entropy of logits with label smoothing, forward and backward. */

/* lse = log sum exp of a row, and its mean. */
INLINE void row_statistics(const void *x, int64_t size, int bf16, float *lse, float *mean) {
    float largest_value = -INFINITY, total = 0, powers = 0;
#pragma omp simd reduction(max : largest_value) reduction(+ : total)
    for (int64_t i = 0; i < size; i++) {
        float value = read_element(x, i, bf16);
        largest_value = value > largest_value ? value : largest_value;
        total += value;
    }
#pragma omp simd reduction(+ : powers)
    for (int64_t i = 0; i < size; i++) powers += fast_exp(read_element(x, i, bf16) - largest_value);
    *lse = largest_value + logf(powers);
    *mean = total / (float)size;
}

/* For each row of logits, `stride` apart: lse, the loss of its label, and the mean loss over the vocabulary. A negative
   label is padding, whose results are 0. */
void transduce_cross_entropy_forward(const void *logits, int64_t bf16, int64_t rows, int64_t size, int64_t stride,
                                     const int64_t *labels, float *lse, float *nll, float *uniform, int64_t threads) {
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const char *x = (const char *)logits + row * stride * (bf16 ? 2 : 4);
        float mean;
        lse[row] = nll[row] = uniform[row] = 0;
        if (labels[row] < 0) continue;
        if (bf16) row_statistics(x, size, 1, lse + row, &mean);
        else row_statistics(x, size, 0, lse + row, &mean);
        nll[row] = lse[row] - read_element(x, labels[row], bf16 != 0);
        uniform[row] = lse[row] - mean;
    }
}

INLINE void row_gradient(const void *x, int64_t size, int bf16, float lse, float eps_share, float grad, void *y) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++)
        write_element(y, i, (fast_exp(read_element(x, i, bf16) - lse) - eps_share) * grad, bf16);
}

/* d loss / d x_j = (p_j - (1 - eps) [j = label] - eps / V) grad, in contiguous rows, which may overwrite the logits. */
void transduce_cross_entropy_backward(const void *logits, int64_t bf16, int64_t rows, int64_t size, int64_t stride,
                                      const int64_t *labels, const float *lse, const float *grad, double eps,
                                      void *result, int64_t threads) {
    float eps_share = (float)(eps / (double)size), label_share = (float)(1 - eps);
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        int64_t bytes = bf16 ? 2 : 4, label = labels[row];
        const char *x = (const char *)logits + row * stride * bytes;
        char *y = (char *)result + row * size * bytes;
        if (label < 0) {
            memset(y, 0, size * bytes);
            continue;
        }
        /* Computed first, because the result may overwrite the logits. */
        float probability = fast_exp(read_element(x, label, bf16 != 0) - lse[row]);
        if (bf16) row_gradient(x, size, 1, lse[row], eps_share, *grad, y);
        else row_gradient(x, size, 0, lse[row], eps_share, *grad, y);
        write_element(y, label, (probability - eps_share - label_share) * *grad, bf16 != 0);
    }
}
