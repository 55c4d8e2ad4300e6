/* Dot-product attention over short rows in training, forward and backward: one row and head at a time, in fp32 inside.
   Nothing is stored between the passes: the attention weights are computed again. */

typedef struct {
    const void *query, *keys, *values, *grad; /* each R H . K; grad: of the context */
    void *context, *query_grad, *keys_grad, *values_grad;
    const uint8_t *mask;   /* R S: the keys that may be attended to; NULL: all */
    int64_t strides[8][3]; /* of row, head and position, in the order of the pointers above */
    int64_t mask_stride;
    int64_t bf16, rows, heads, queries, length, width, causal, threads;
    double scale;
} ShortAttention;

/* c (M N) = a b; the strides are those of a. N is a multiple of LANES. */
INLINE void small_tile(const int tall, const int groups, const float *a, int64_t row_stride, int64_t column_stride,
                       const float *b, int64_t b_row, int64_t depth, float *c, int64_t c_row) {
    floats sums[TILE_ROWS][4];
    for (int r = 0; r < tall; r++)
        for (int v = 0; v < groups; v++) sums[r][v] = broadcast(0.0f);
    for (int64_t k = 0; k < depth; k++, b += b_row) {
        floats read[4];
        for (int v = 0; v < groups; v++) read[v] = load(b + v * LANES);
        for (int r = 0; r < tall; r++) {
            floats one = broadcast(a[r * row_stride + k * column_stride]);
            for (int v = 0; v < groups; v++) sums[r][v] = fma_lanes(one, read[v], sums[r][v]);
        }
    }
    for (int r = 0; r < tall; r++)
        for (int v = 0; v < groups; v++) store(c + r * c_row + v * LANES, sums[r][v]);
}

#define SMALL_TILE(name, tall, groups)                                                                              \
    static __attribute__((noinline)) void small_##name##_##groups(                                                  \
        const float *a, int64_t row_stride, int64_t column_stride, const float *b, int64_t b_row, int64_t depth,    \
        float *c, int64_t c_row) {                                                                                  \
        small_tile(tall, groups, a, row_stride, column_stride, b, b_row, depth, c, c_row);                          \
    }
SMALL_TILE(one, 1, 1)
SMALL_TILE(one, 1, 2)
SMALL_TILE(one, 1, 4)
SMALL_TILE(tall, TILE_ROWS, 1)
SMALL_TILE(tall, TILE_ROWS, 2)
SMALL_TILE(tall, TILE_ROWS, 4)

static void small_product(const float *a, int64_t row_stride, int64_t column_stride, const float *b, int64_t b_row,
                          int64_t depth, float *c, int64_t c_row, int64_t rows, int64_t columns) {
    for (int64_t first = 0; first < columns;) {
        int64_t left = (columns - first) / LANES, groups = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        for (int64_t row = 0; row < rows;) {
            int tall = rows - row >= TILE_ROWS;
            const float *from = a + row * row_stride, *with = b + first;
            float *to = c + row * c_row + first;
            if (tall && groups == 4) small_tall_4(from, row_stride, column_stride, with, b_row, depth, to, c_row);
            else if (tall && groups == 2) small_tall_2(from, row_stride, column_stride, with, b_row, depth, to, c_row);
            else if (tall) small_tall_1(from, row_stride, column_stride, with, b_row, depth, to, c_row);
            else if (groups == 4) small_one_4(from, row_stride, column_stride, with, b_row, depth, to, c_row);
            else if (groups == 2) small_one_2(from, row_stride, column_stride, with, b_row, depth, to, c_row);
            else small_one_1(from, row_stride, column_stride, with, b_row, depth, to, c_row);
            row += tall ? TILE_ROWS : 1;
        }
        first += groups * LANES;
    }
}

INLINE int64_t round_to_lanes(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

/* Rows of one head, `step` apart, to fp32 rows of `padded` numbers, filled up with 0. */
INLINE void read_rows(const void *from, int bf16, int64_t first, int64_t step, int64_t rows, int64_t width,
                      int64_t padded, float *to) {
    for (int64_t row = 0; row < rows; row++, to += padded) {
        for (int64_t i = 0; i < width; i++) to[i] = read_element(from, first + row * step + i, bf16);
        for (int64_t i = width; i < padded; i++) to[i] = 0;
    }
}

static void read_head(const ShortAttention *a, int which, const void *from, int64_t row, int64_t head, int64_t rows,
                      float *to) {
    const int64_t *stride = a->strides[which];
    int64_t first = row * stride[0] + head * stride[1], padded = round_to_lanes(a->width);
    if (a->bf16) read_rows(from, 1, first, stride[2], rows, a->width, padded, to);
    else read_rows(from, 0, first, stride[2], rows, a->width, padded, to);
}

static void write_head(const ShortAttention *a, int which, void *to, int64_t row, int64_t head, int64_t rows,
                       const float *from) {
    const int64_t *stride = a->strides[which];
    int64_t first = row * stride[0] + head * stride[1], padded = round_to_lanes(a->width);
    for (int64_t r = 0; r < rows; r++, from += padded, first += stride[2])
        if (a->bf16) for (int64_t i = 0; i < a->width; i++) write_element(to, first + i, from[i], 1);
        else for (int64_t i = 0; i < a->width; i++) write_element(to, first + i, from[i], 0);
}

/* M N -> N M; rows of the result have `padded` numbers, filled up with 0. */
static void transpose_head(const float *from, int64_t rows, int64_t width, int64_t padded, float *to) {
    int64_t from_padded = round_to_lanes(width), row = 0;
#if SIMD_LEVEL > 1
    for (; row + 4 <= rows; row += 4)
        /* Beyond the width the input is 0, and the result has space for as many rows. */
        for (int64_t i = 0; i < from_padded; i += 4) {
            const float *x = from + row * from_padded + i;
            float *y = to + i * padded + row;
            __m128 a = _mm_loadu_ps(x), b = _mm_loadu_ps(x + from_padded);
            __m128 c = _mm_loadu_ps(x + 2 * from_padded), d = _mm_loadu_ps(x + 3 * from_padded);
            _MM_TRANSPOSE4_PS(a, b, c, d);
            _mm_storeu_ps(y, a), _mm_storeu_ps(y + padded, b);
            _mm_storeu_ps(y + 2 * padded, c), _mm_storeu_ps(y + 3 * padded, d);
        }
#endif
    for (int64_t i = 0; i < width; i++) {
        for (int64_t left = row; left < rows; left++) to[i * padded + left] = from[left * from_padded + i];
        for (int64_t left = rows; left < padded; left++) to[i * padded + left] = 0;
    }
}

/* Softmax of scaled scores, 0 under the mask. `visible`: scratch space for one number per key. */
static void softmax_head(const ShortAttention *a, int64_t row, float *weights, float *visible) {
    int64_t padded = round_to_lanes(a->length);
    const uint8_t *mask = a->mask ? a->mask + row * a->mask_stride : NULL;
    float scale = (float)a->scale;
    for (int64_t s = 0; s < padded; s++) visible[s] = s < a->length && !a->causal && (!mask || mask[s]) ? 1.0f : 0.0f;
    for (int64_t t = 0; t < a->queries; t++, weights += padded) {
        if (a->causal) visible[t] = !mask || mask[t] ? 1.0f : 0.0f;
        float largest_score = -1e30f, sum = 0;
#pragma omp simd reduction(max : largest_score)
        for (int64_t s = 0; s < padded; s++) {
            float score = visible[s] > 0 ? weights[s] * scale : -1e30f;
            weights[s] = score, largest_score = score > largest_score ? score : largest_score;
        }
#pragma omp simd reduction(+ : sum)
        for (int64_t s = 0; s < padded; s++) {
            weights[s] = fast_exp(weights[s] - largest_score) * visible[s];
            sum += weights[s];
        }
        float factor = sum > 0 ? 1 / sum : sum; /* nan stays nan */
#pragma omp simd
        for (int64_t s = 0; s < padded; s++) weights[s] *= factor;
    }
}

/* Attention weights (T S) of one row and head. `transposed`: scratch space for the keys. */
static void head_weights(const ShortAttention *a, int64_t row, const float *query, const float *keys, float *transposed,
                         float *weights, float *visible) {
    int64_t padded_width = round_to_lanes(a->width), padded = round_to_lanes(a->length);
    transpose_head(keys, a->length, a->width, padded, transposed);
    small_product(query, padded_width, 1, transposed, padded, a->width, weights, padded, a->queries, padded);
    softmax_head(a, row, weights, visible);
}

static void head_forward(const ShortAttention *a, int64_t row, int64_t head, float *scratch) {
    int64_t padded_width = round_to_lanes(a->width), padded = round_to_lanes(a->length);
    float *query = scratch, *keys = query + a->queries * padded_width, *transposed = keys + a->length * padded_width;
    float *weights = transposed + padded_width * padded;
    read_head(a, 0, a->query, row, head, a->queries, query);
    read_head(a, 1, a->keys, row, head, a->length, keys);
    head_weights(a, row, query, keys, transposed, weights, weights + a->queries * padded);
    read_head(a, 2, a->values, row, head, a->length, keys);
    small_product(weights, padded, 1, keys, padded_width, a->length, query, padded_width, a->queries, padded_width);
    write_head(a, 4, a->context, row, head, a->queries, query);
}

/* dV = P' dC, dP = dC V', dS = P (dP - sum P dP) scale, dQ = dS K, dK = dS' Q. */
static void head_backward(const ShortAttention *a, int64_t row, int64_t head, float *scratch) {
    int64_t queries = a->queries, length = a->length;
    int64_t padded_width = round_to_lanes(a->width), padded = round_to_lanes(length);
    float *query = scratch, *keys = query + queries * padded_width, *values = keys + length * padded_width;
    float *grad = values + length * padded_width, *transposed = grad + queries * padded_width;
    float *weights = transposed + padded_width * padded, *weights_grad = weights + queries * padded;
    read_head(a, 0, a->query, row, head, queries, query);
    read_head(a, 1, a->keys, row, head, length, keys);
    read_head(a, 2, a->values, row, head, length, values);
    read_head(a, 3, a->grad, row, head, queries, grad);
    head_weights(a, row, query, keys, transposed, weights, weights_grad);
    transpose_head(values, length, a->width, padded, transposed);
    small_product(grad, padded_width, 1, transposed, padded, a->width, weights_grad, padded, queries, padded);
    /* The values are no longer needed: dV takes their place. */
    small_product(weights, 1, padded, grad, padded_width, queries, values, padded_width, length, padded_width);
    write_head(a, 7, a->values_grad, row, head, length, values);
    for (int64_t t = 0; t < queries; t++) {
        float sum = 0, scale = (float)a->scale, *p = weights + t * padded, *d = weights_grad + t * padded;
#pragma omp simd reduction(+ : sum)
        for (int64_t s = 0; s < padded; s++) sum += p[s] * d[s];
#pragma omp simd
        for (int64_t s = 0; s < padded; s++) d[s] = p[s] * (d[s] - sum) * scale;
    }
    small_product(weights_grad, padded, 1, keys, padded_width, length, grad, padded_width, queries, padded_width);
    write_head(a, 5, a->query_grad, row, head, queries, grad);
    small_product(weights_grad, 1, padded, query, padded_width, queries, keys, padded_width, length, padded_width);
    write_head(a, 6, a->keys_grad, row, head, length, keys);
}

/* Nonzero: out of memory. */
static int64_t for_each_head(const ShortAttention *a, int backward) {
    int64_t padded_width = round_to_lanes(a->width), padded = round_to_lanes(a->length), failed = 0;
    int64_t numbers = 2 * (a->queries + a->length) * padded_width + padded_width * padded;
    numbers += (2 * a->queries + 1) * padded;
#pragma omp parallel if (a->threads > 1) num_threads(a->threads) reduction(+ : failed)
    {
        float *scratch = malloc(numbers * 4 + 64);
        failed += !scratch;
#pragma omp for
        for (int64_t one = 0; one < a->rows * a->heads; one++) {
            if (!scratch) continue;
            if (backward) head_backward(a, one / a->heads, one % a->heads, scratch);
            else head_forward(a, one / a->heads, one % a->heads, scratch);
        }
        free(scratch);
    }
    return failed;
}

int64_t transduce_attention_forward(const ShortAttention *a) { return for_each_head(a, 0); }
int64_t transduce_attention_backward(const ShortAttention *a) { return for_each_head(a, 1); }
