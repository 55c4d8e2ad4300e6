/* A Transformer encoder block over whole sources: every row attends to all real rows of its source. */

#define ENCODER_ROWS 128 /* rows processed together: their activations stay in the processor cache */

typedef struct {
    int64_t sources, source_length; /* B S */
    const float *mask_bias;       /* B S: 0, or -inf for padding */
    int64_t threads;
} EncoderInput;

/* scores = scale q k + mask_bias of `tall` queries; keys are transposed, `wide` columns each. */
INLINE void score(const int tall, const float *query, int64_t stride, const float *transposed_keys, const float *mask_bias,
                  float scale, int64_t wide, int64_t width, float *scores) {
    for (int64_t column = 0; column < wide; column += LANES) {
        floats sums[4];
        for (int r = 0; r < tall; r++) sums[r] = broadcast(0.0f);
        for (int64_t k = 0; k < width; k++) {
            floats keys = load(transposed_keys + k * wide + column);
            for (int r = 0; r < tall; r++) sums[r] = fma_lanes(broadcast(query[r * stride + k]), keys, sums[r]);
        }
        for (int r = 0; r < tall; r++)
            store(scores + r * wide + column, fma_lanes(sums[r], broadcast(scale), load(mask_bias + column)));
    }
}

/* context = scores v of `tall` rows */
INLINE void weighted_sum(const int tall, const float *scores, int64_t wide, const float *values, int64_t stride, int64_t count,
                  int64_t width, float *context, int64_t apart) {
    for (int64_t at = 0; at < width; at += 2 * LANES) {
        floats sums[4][2];
        for (int r = 0; r < tall; r++) sums[r][0] = sums[r][1] = broadcast(0.0f);
        for (int64_t i = 0; i < count; i++) {
            floats low = load(values + i * stride + at), high = load(values + i * stride + at + LANES);
            for (int r = 0; r < tall; r++) {
                floats share = broadcast(scores[r * wide + i]);
                sums[r][0] = fma_lanes(share, low, sums[r][0]);
                sums[r][1] = fma_lanes(share, high, sums[r][1]);
            }
        }
        for (int r = 0; r < tall; r++) {
            store(context + r * apart + at, sums[r][0]);
            store(context + r * apart + at + LANES, sums[r][1]);
        }
    }
}

static void encoder_self_attend(const Block *block, const float *qkv_row, const float *mask_bias, int64_t count, float *context,
                        float *transposed_keys, float *scores, int64_t *offsets) {
    int64_t heads = block->heads, width = block->head_width, size = heads * width, wide = (count + LANES - 1) / LANES * LANES;
    float *dark = scores + 4 * wide, scale = (float)block->scale;
    for (int64_t i = 0; i < wide; i++) dark[i] = i < count ? mask_bias[i] : -INFINITY;
    for (int64_t i = 0; i < count; i++) offsets[i] = i * 3 * size;
    for (int64_t head = 0; head < heads; head++) {
        const float *queries = qkv_row + head * width, *keys = queries + size, *values = keys + size;
        float *to = context + head * width;
        if (width % (2 * LANES)) {
            for (int64_t row = 0; row < count; row++)
                attend(queries + offsets[row], keys, values, offsets, count, dark, scale, width, scores, to + row * size);
            continue;
        }
        for (int64_t k = 0; k < width; k++)
            for (int64_t i = 0; i < wide; i++) transposed_keys[k * wide + i] = i < count ? keys[i * 3 * size + k] : 0.0f;
        int64_t row = 0;
        for (; row + 4 <= count; row += 4) {
            score(4, queries + offsets[row], 3 * size, transposed_keys, dark, scale, wide, width, scores);
            for (int r = 0; r < 4; r++) softmax(scores + r * wide, wide);
            weighted_sum(4, scores, wide, values, 3 * size, count, width, to + row * size, size);
        }
        for (; row < count; row++) {
            score(1, queries + offsets[row], 3 * size, transposed_keys, dark, scale, wide, width, scores);
            softmax(scores, wide);
            weighted_sum(1, scores, wide, values, 3 * size, count, width, to + row * size, size);
        }
    }
}

/* x: B S D, in place. Real rows of a few sources at a time are packed together. Nonzero: out of memory. */
int64_t transduce_encoder_block(const Block *block, const EncoderInput *given, float *x) {
    int64_t columns = given->source_length, width = block->qkv.inputs, hidden = block->up.outputs;
    int64_t size = block->heads * block->head_width, wide = most(3 * size, hidden), reads = most(most(width, hidden), size);
    int64_t rows = ENCODER_ROWS + columns, padded = (columns + LANES - 1) / LANES * LANES;
    int64_t each = 2 * width + wide + size + (block->gate.weights ? hidden : 0);
    int64_t numbers = rows * each + padded * (block->head_width + 5) + 64;
    char *memory = malloc(columns * 8 + numbers * 4 + rows * (reads + 8) + 256);
    if (!memory) return 1;
    Scratch scratch;
    scratch.offsets = (int64_t *)memory;
    float *packed = (float *)(scratch.offsets + columns), *transposed_keys;
    scratch.normed = packed + rows * width;
    scratch.hidden = scratch.normed + rows * width;
    scratch.context = scratch.hidden + rows * wide;
    scratch.gated = scratch.context + rows * size;
    transposed_keys = scratch.gated + (block->gate.weights ? rows * hidden : 0);
    scratch.scores = transposed_keys + padded * block->head_width;
    scratch.quantised = memory + columns * 8 + numbers * 4;
    Epilogue epilogue = {0, NULL, given->threads};
    for (int64_t first = 0, next; first < given->sources; first = next) {
        int64_t together = 0;
        for (next = first; next < given->sources && together < ENCODER_ROWS; next++) {
            int64_t count = real_rows(given->mask_bias + next * columns, columns);
            memcpy(packed + together * width, x + next * columns * width, count * width * sizeof(float));
            together += count;
        }
        linear(&block->qkv, sublayer_input(block, 0, packed, together, &scratch), together, scratch.hidden, &epilogue,
                 scratch.quantised);
        for (int64_t source = first, at = 0; source < next; source++) {
            const float *mask_bias = given->mask_bias + source * columns;
            int64_t count = real_rows(mask_bias, columns);
            encoder_self_attend(block, scratch.hidden + at * 3 * size, mask_bias, count, scratch.context + at * size, transposed_keys,
                        scratch.scores, scratch.offsets);
            at += count;
        }
        add_residual(block, 0, &block->attention_out, scratch.context, together, packed, given->threads, &scratch);
        feed_forward(block, together, packed, given->threads, &scratch);
        for (int64_t source = first, at = 0; source < next; source++) {
            int64_t count = real_rows(given->mask_bias + source * columns, columns);
            memcpy(x + source * columns * width, packed + at * width, count * width * sizeof(float));
            at += count;
        }
    }
    free(memory);
    return 0;
}
