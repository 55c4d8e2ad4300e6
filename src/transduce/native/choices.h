/* Scores of a vocabulary in, the best of each row out. */

#define GROUP 256   /* numbers that are passed over together where none is among the best */

static float greatest(const float *x, int64_t count) {
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < count; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* The `count` best of a row, best first, the earlier of two that are equal. */
static void top_row(const float *x, int64_t size, int64_t count, float *best, int64_t *places) {
    int64_t held = 0;
    for (int64_t from = 0; from < size; from += GROUP) {
        int64_t to = from + GROUP < size ? from + GROUP : size;
        if (held == count && !(greatest(x + from, to - from) > best[count - 1])) continue;
        for (int64_t i = from; i < to; i++) {
            if (held == count && !(x[i] > best[count - 1])) continue;
            int64_t at = held < count ? held++ : count - 1;
            for (; at > 0 && x[i] > best[at - 1]; at--) best[at] = best[at - 1], places[at] = places[at - 1];
            best[at] = x[i], places[at] = i;
        }
    }
}

void transduce_top(const float *x, int64_t rows, int64_t size, int64_t count, float *best, int64_t *places) {
    for (int64_t row = 0; row < rows; row++)
        top_row(x + row * size, size, count, best + row * count, places + row * count);
}
