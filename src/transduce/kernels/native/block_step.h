/* One decoding step through a Transformer block: layer norm, attention over the KV cache and the memory, activations. */

typedef struct {
    const float *weight, *bias; /* either may be NULL */
    double epsilon;
} Norm;

typedef struct {
    Linear qkv, attention_out;     /* self-attention; queries, keys and values by one matrix */
    Linear cross_query, cross_out; /* cross-attention; without weights: there is no memory */
    Linear up, gate, down;         /* feed-forward; gate without weights: not gated */
    Norm norms[3];                 /* of the three sublayers; the second is unused without a memory */
    int64_t pre_norm;              /* x + f(norm(x)), else norm(x + f(x)) */
    int64_t heads, head_width;
    int64_t activation;            /* see `apply_activation` */
    double scale, memory_scale;    /* of attention scores */
} Block;

/* Rows of one decoding step. A search has R = sources * beams rows; finished ones are left out. */
typedef struct {
    int64_t rows, beams, capacity, window; /* rows of this call; positions of a cache; window < 0: no limit */
    const int64_t *row_ids;                /* index among the R of each row, ascending; NULL: all rows */
    const int64_t *positions;              /* R: position of the new token */
    const int16_t *cache_indirection;      /* R capacity: which beam's slot holds a row's token at each position */
    float *keys, *values;                  /* B N capacity H*K: the KV cache of this block */
    int64_t source_length;                 /* S */
    const float *memory_keys, *memory_values; /* B H S K */
    const float *mask_bias;                   /* B S: 0, or -inf for padding */
    int64_t threads;
} Step;

typedef struct { /* activations between the linear layers of a block */
    float *normed, *hidden, *gated, *context, *scores;
    int64_t *offsets;
    void *quantised;
} Scratch;

static void layer_norm(const float *x, int64_t rows, int64_t width, const Norm *norm, float *y) {
    for (int64_t row = 0; row < rows; row++, x += width, y += width) {
        float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += x[i];
        float mean = sum / width;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; i++) squares += (x[i] - mean) * (x[i] - mean);
        float inverse = (float)(1.0 / sqrt(squares / width + norm->epsilon));
        for (int64_t i = 0; i < width; i++) y[i] = (x[i] - mean) * inverse;
        if (norm->weight) for (int64_t i = 0; i < width; i++) y[i] *= norm->weight[i];
        if (norm->bias) for (int64_t i = 0; i < width; i++) y[i] += norm->bias[i];
    }
}

INLINE float dot(const float *a, const float *b, int64_t width) {
    floats sum = broadcast(0.0f);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) sum = fma_lanes(load(a + i), load(b + i), sum);
    float rest = 0;
    for (; i < width; i++) rest += a[i] * b[i];
    return reduce_add(sum) + rest;
}

/* softmax in position; `count` is a multiple of LANES */
INLINE void softmax(float *scores, int64_t count) {
    floats high = load(scores), sums = broadcast(0.0f);
    for (int64_t i = LANES; i < count; i += LANES) high = max_lanes(high, load(scores + i));
    float top = reduce_max(high);
    if (top == -INFINITY) top = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        floats one = exp_lanes(add(load(scores + i), broadcast(-top)));
        store(scores + i, one);
        sums = add(sums, one);
    }
    floats down = broadcast(1.0f / reduce_add(sums));
    for (int64_t i = 0; i < count; i += LANES) store(scores + i, mul(load(scores + i), down));
}

/* softmax(scale q k + mask_bias) v of one head of one row; key and value i begin at offsets[i]. `scores` has space for a
   multiple of LANES. */
INLINE void attend_width(const float *query, const float *keys, const float *values, const int64_t *offsets, int64_t count,
                      const float *mask_bias, float scale, const int64_t width, float *scores, float *context) {
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = 0; width % LANES == 0 && i < count; i += 4) {
        floats sums[4] = {broadcast(0.0f), broadcast(0.0f), broadcast(0.0f), broadcast(0.0f)};
        const float *four[4]; /* the last key fills an incomplete group */
        for (int one = 0; one < 4; one++) four[one] = keys + offsets[i + one < count ? i + one : count - 1];
        for (int64_t at = 0; at < width; at += LANES) {
            floats part = load(query + at);
            for (int one = 0; one < 4; one++) sums[one] = fma_lanes(part, load(four[one] + at), sums[one]);
        }
        reduce_add4(sums, scores + i);
    }
    for (int64_t i = 0; width % LANES && i < count; i++) scores[i] = dot(query, keys + offsets[i], width);
    for (int64_t i = 0; i < count; i += LANES) { /* whole vectors: a single number costs as much */
        floats group = mul(load_partial(scores + i, count - i, -INFINITY), broadcast(scale));
        store(scores + i, mask_bias ? add(group, load_partial(mask_bias + i, count - i, 0.0f)) : group);
    }
    softmax(scores, padded);
    int64_t at = 0;
    for (; at + 2 * LANES <= width; at += 2 * LANES) { /* even and odd sums apart, to hide the latency of fma */
        floats sums[4] = {broadcast(0.0f), broadcast(0.0f), broadcast(0.0f), broadcast(0.0f)};
        int64_t i = 0;
        for (; i + 2 <= count; i += 2)
            for (int v = 0; v < 4; v++) {
                const float *from = values + offsets[i + v / 2] + at + v % 2 * LANES;
                sums[v] = fma_lanes(broadcast(scores[i + v / 2]), load(from), sums[v]);
            }
        for (; i < count; i++)
            for (int v = 0; v < 2; v++)
                sums[v] = fma_lanes(broadcast(scores[i]), load(values + offsets[i] + at + v * LANES), sums[v]);
        for (int v = 0; v < 2; v++) store(context + at + v * LANES, add(sums[v], sums[v + 2]));
    }
    for (; at + LANES <= width; at += LANES) {
        floats sum = broadcast(0.0f);
        for (int64_t i = 0; i < count; i++) sum = fma_lanes(broadcast(scores[i]), load(values + offsets[i] + at), sum);
        store(context + at, sum);
    }
    for (; at < width; at++) {
        float sum = 0;
        for (int64_t i = 0; i < count; i++) sum += scores[i] * values[offsets[i] + at];
        context[at] = sum;
    }
}

/* Common head widths are compile-time constants. */
static void attend(const float *query, const float *keys, const float *values, const int64_t *offsets, int64_t count,
                   const float *mask_bias, float scale, int64_t width, float *scores, float *context) {
    if (width == 32) attend_width(query, keys, values, offsets, count, mask_bias, scale, 32, scores, context);
    else if (width == 64) attend_width(query, keys, values, offsets, count, mask_bias, scale, 64, scores, context);
    else attend_width(query, keys, values, offsets, count, mask_bias, scale, width, scores, context);
}

INLINE int64_t row_of(const Step *step, int64_t one) { return step->row_ids ? step->row_ids[one] : one; }

/* Self-attention. New keys and values go to the slot of their row and position; past tokens are read through the cache
   indirection. */
static void self_attend(const Block *block, const Step *step, int64_t first, int64_t rows, const Scratch *scratch) {
    int64_t heads = block->heads, width = block->head_width, size = heads * width, *offsets = scratch->offsets;
    for (int64_t one = 0; one < rows; one++) {
        const float *qkv_row = scratch->hidden + 3 * one * size;
        int64_t row = row_of(step, first + one), position = step->positions[row], begin = row / step->beams * step->beams;
        int64_t from = step->window >= 0 && position > step->window ? position - step->window : 0, count = 0;
        int64_t slot = (row * step->capacity + position) * size;
        memcpy(step->keys + slot, qkv_row + size, size * sizeof(float));
        memcpy(step->values + slot, qkv_row + 2 * size, size * sizeof(float));
        for (int64_t at = from; at < position; at++) {
            int64_t slot_row = step->beams > 1 ? begin + step->cache_indirection[row * step->capacity + at] : row;
            offsets[count++] = (slot_row * step->capacity + at) * size;
        }
        offsets[count++] = slot;
        for (int64_t head = 0; head < heads; head++)
            attend(qkv_row + head * width, step->keys + head * width, step->values + head * width, offsets, count,
                   NULL, (float)block->scale, width, scratch->scores, scratch->context + one * size + head * width);
    }
}

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Length of a source without its padding. */
static int64_t real_rows(const float *mask_bias, int64_t columns) {
    while (columns > 0 && mask_bias[columns - 1] == -INFINITY) columns--;
    return columns;
}

/* Cross-attention. Rows of one source share each head of its keys while it is in the processor cache. Padding is not read:
   the memory of a search has columns for longer sources, and its weights would be 0. */
static void cross_attend(const Block *block, const Step *step, int64_t first, int64_t rows, const Scratch *scratch) {
    int64_t heads = block->heads, width = block->head_width, size = heads * width;
    for (int64_t i = 0; i < step->source_length; i++) scratch->offsets[i] = i * width;
    for (int64_t one = 0, next; one < rows; one = next) {
        int64_t source = row_of(step, first + one) / step->beams;
        for (next = one + 1; next < rows && row_of(step, first + next) / step->beams == source;) next++;
        const float *mask_bias = step->mask_bias + source * step->source_length;
        int64_t count = most(real_rows(mask_bias, step->source_length), 1);
        for (int64_t head = 0; head < heads; head++) {
            int64_t begin = (source * heads + head) * step->source_length * width;
            for (int64_t row = one; row < next; row++)
                attend(scratch->hidden + row * size + head * width, step->memory_keys + begin,
                       step->memory_values + begin, scratch->offsets, count, mask_bias, (float)block->memory_scale, width,
                       scratch->scores, scratch->context + row * size + head * width);
        }
    }
}

enum { RELU, GELU, GELU_TANH, SILU };

static void apply_activation(float *x, int64_t count, int64_t kind) {
    for (int64_t i = 0; i < count; i++) {
        float one = x[i];
        if (kind == GELU) x[i] = 0.5f * one * (1.0f + erff(one * 0.70710678f));
        if (kind == GELU_TANH) x[i] = 0.5f * one * (1.0f + tanhf(0.79788456f * (one + 0.044715f * one * one * one)));
        if (kind == SILU) x[i] = one / (1.0f + expf(-one));
    }
}
