/* Dropout whose mask follows from a seed, alone or added to a residual. */

/* A hash of a number and two keys: rounds of shifts and odd factors, each of which is one to one. */
INLINE uint32_t random_bits(uint32_t x, uint32_t low, uint32_t high) {
    x = (x ^ low) * 0x9E3779B1u;
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x = (x + high) * 0x846CA68Bu;
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    return x ^ (x >> 15);
}

INLINE void dropout_range(const float *residual, const void *x, int bf16, int64_t from, int64_t to, const int64_t *seed,
                          double rate, void *y, int bf16_y, int adds) {
    uint32_t low = (uint32_t)seed[0], high = (uint32_t)(seed[0] >> 32), threshold = (uint32_t)(rate * 4294967296.0);
    float scale = (float)(1 / (1 - rate));
#pragma omp simd
    for (int64_t i = from; i < to; i++) {
        float value = random_bits((uint32_t)i, low, high) >= threshold ? read_element(x, i, bf16) * scale : 0.0f;
        write_element(y, i, adds ? residual[i] + value : value, bf16_y);
    }
}

/* y = residual + dropout(x), or dropout(x) alone where there is no residual. The seed determines the mask. */
void transduce_dropout(const float *residual, const void *x, int64_t bf16, int64_t count, const int64_t *seed,
                       double rate, void *y, int64_t bf16_y, int64_t threads) {
    int64_t size = (count + threads - 1) / threads;
#pragma omp parallel for if (threads > 1) num_threads(threads)
    for (int64_t number = 0; number < threads; number++) {
        int64_t from = number * size, to = from + size < count ? from + size : count;
        if (residual && bf16) dropout_range(residual, x, 1, from, to, seed, rate, y, 0, 1);
        else if (residual) dropout_range(residual, x, 0, from, to, seed, rate, y, 0, 1);
        else if (bf16 && bf16_y) dropout_range(residual, x, 1, from, to, seed, rate, y, 1, 0);
        else if (bf16_y) dropout_range(residual, x, 0, from, to, seed, rate, y, 1, 0);
        else if (bf16) dropout_range(residual, x, 1, from, to, seed, rate, y, 0, 0);
        else dropout_range(residual, x, 0, from, to, seed, rate, y, 0, 0);
    }
}
