/* The rows of whole sources in, the same through one block out: every row sees all real rows of its own source. */

#define TOGETHER 128 /* rows that go through a block together: what they need stays in the processor's cache */

typedef struct {
    int64_t sources, columns; /* B S */
    const float *shade;       /* B S: 0, or -inf where nothing may be seen */
    int64_t threads;
} Sources;

/* scores = scale q k + shade of `tall` queries, with keys that lie number by number: `wide` columns each. */
INLINE void score(const int tall, const float *query, int64_t stride, const float *turned, const float *shade,
                  float scale, int64_t wide, int64_t width, float *scores) {
    for (int64_t column = 0; column < wide; column += LANES) {
        floats sums[4];
        for (int r = 0; r < tall; r++) sums[r] = every(0.0f);
        for (int64_t k = 0; k < width; k++) {
            floats keys = load(turned + k * wide + column);
            for (int r = 0; r < tall; r++) sums[r] = fused(every(query[r * stride + k]), keys, sums[r]);
        }
        for (int r = 0; r < tall; r++)
            store(scores + r * wide + column, fused(sums[r], every(scale), load(shade + column)));
    }
}

/* context = scores v of `tall` rows */
INLINE void blend(const int tall, const float *scores, int64_t wide, const float *values, int64_t stride, int64_t count,
                  int64_t width, float *context, int64_t apart) {
    for (int64_t at = 0; at < width; at += 2 * LANES) {
        floats sums[4][2];
        for (int r = 0; r < tall; r++) sums[r][0] = sums[r][1] = every(0.0f);
        for (int64_t i = 0; i < count; i++) {
            floats low = load(values + i * stride + at), high = load(values + i * stride + at + LANES);
            for (int r = 0; r < tall; r++) {
                floats share = every(scores[r * wide + i]);
                sums[r][0] = fused(share, low, sums[r][0]);
                sums[r][1] = fused(share, high, sums[r][1]);
            }
        }
        for (int r = 0; r < tall; r++) {
            store(context + r * apart + at, sums[r][0]);
            store(context + r * apart + at + LANES, sums[r][1]);
        }
    }
}

static void look_around(const Block *block, const float *every_row, const float *shade, int64_t count, float *context,
                        float *turned, float *scores, int64_t *offsets) {
    int64_t heads = block->heads, width = block->head, size = heads * width, wide = (count + LANES - 1) / LANES * LANES;
    float *dark = scores + 4 * wide, scale = (float)block->scale;
    for (int64_t i = 0; i < wide; i++) dark[i] = i < count ? shade[i] : -INFINITY;
    for (int64_t i = 0; i < count; i++) offsets[i] = i * 3 * size;
    for (int64_t head = 0; head < heads; head++) {
        const float *queries = every_row + head * width, *keys = queries + size, *values = keys + size;
        float *to = context + head * width;
        if (width % (2 * LANES)) {
            for (int64_t row = 0; row < count; row++)
                attend(queries + offsets[row], keys, values, offsets, count, dark, scale, width, scores, to + row * size);
            continue;
        }
        for (int64_t k = 0; k < width; k++)
            for (int64_t i = 0; i < wide; i++) turned[k * wide + i] = i < count ? keys[i * 3 * size + k] : 0.0f;
        int64_t row = 0;
        for (; row + 4 <= count; row += 4) {
            score(4, queries + offsets[row], 3 * size, turned, dark, scale, wide, width, scores);
            for (int r = 0; r < 4; r++) soften(scores + r * wide, wide);
            blend(4, scores, wide, values, 3 * size, count, width, to + row * size, size);
        }
        for (; row < count; row++) {
            score(1, queries + offsets[row], 3 * size, turned, dark, scale, wide, width, scores);
            soften(scores, wide);
            blend(1, scores, wide, values, 3 * size, count, width, to + row * size, size);
        }
    }
}

/* Rows of a source that count: up to its last real one. Padding behind it stays as it is. */
static int64_t real_rows(const float *shade, int64_t columns) {
    while (columns > 0 && shade[columns - 1] == -INFINITY) columns--;
    return columns;
}

/* x: B S D, written over. The real rows of a few sources at a time lie together in `packed`. Nonzero: no memory. */
int64_t transduce_read(const Block *block, const Sources *given, float *x) {
    int64_t columns = given->columns, width = block->every.inputs, hidden = block->grow.outputs;
    int64_t size = block->heads * block->head, wide = most(3 * size, hidden), reads = most(most(width, hidden), size);
    int64_t rows = TOGETHER + columns, padded = (columns + LANES - 1) / LANES * LANES;
    int64_t each = 2 * width + wide + size + (block->gate.weights ? hidden : 0);
    int64_t numbers = rows * each + padded * (block->head + 5) + 64;
    char *memory = malloc(columns * 8 + numbers * 4 + rows * (reads + 8) + 256);
    if (!memory) return 1;
    Scratch scratch;
    scratch.offsets = (int64_t *)memory;
    float *packed = (float *)(scratch.offsets + columns), *turned;
    scratch.normed = packed + rows * width;
    scratch.wide = scratch.normed + rows * width;
    scratch.context = scratch.wide + rows * wide;
    scratch.gated = scratch.context + rows * size;
    turned = scratch.gated + (block->gate.weights ? rows * hidden : 0);
    scratch.scores = turned + padded * block->head;
    scratch.rounded = memory + columns * 8 + numbers * 4;
    After after = {0, NULL, given->threads};
    for (int64_t first = 0, next; first < given->sources; first = next) {
        int64_t together = 0;
        for (next = first; next < given->sources && together < TOGETHER; next++) {
            int64_t count = real_rows(given->shade + next * columns, columns);
            memcpy(packed + together * width, x + next * columns * width, count * width * sizeof(float));
            together += count;
        }
        multiply(&block->every, enter(block, 0, packed, together, &scratch), together, scratch.wide, &after,
                 scratch.rounded);
        for (int64_t source = first, at = 0; source < next; source++) {
            const float *shade = given->shade + source * columns;
            int64_t count = real_rows(shade, columns);
            look_around(block, scratch.wide + at * 3 * size, shade, count, scratch.context + at * size, turned,
                        scratch.scores, scratch.offsets);
            at += count;
        }
        leave(block, 0, &block->result, scratch.context, together, packed, given->threads, &scratch);
        think(block, together, packed, given->threads, &scratch);
        for (int64_t source = first, at = 0; source < next; source++) {
            int64_t count = real_rows(given->shade + source * columns, columns);
            memcpy(x + source * columns * width, packed + at * width, count * width * sizeof(float));
            at += count;
        }
    }
    free(memory);
    return 0;
}
