/* The rows of one step of a search in, the same through one Transformer block out, with their keys and values kept. */

typedef struct {
    const float *weight, *bias; /* either may be NULL */
    double epsilon;
} Norm;

typedef struct {
    Matrix every, result;        /* look back: queries, keys and values by one matrix */
    Matrix asks, answers;        /* look up; no weights: there is no memory */
    Matrix grow, gate, shrink;   /* think; gate without weights: there is none */
    Norm norms[3];               /* of the three, the second unused without a memory */
    int64_t before;              /* x + f(norm(x)), else norm(x + f(x)) */
    int64_t heads, head;         /* how many, how wide */
    int64_t activation;          /* see `activate` */
    double scale, memory_scale;  /* of scores */
} Block;

/* Where the rows of a step stand. A search has R = sources * beams; those that nobody asks about are left out. */
typedef struct {
    int64_t rows, beams, room, reach; /* how many are read; reach < 0: all that came before */
    const int64_t *which;             /* which of the R they are, in order; NULL: all of them */
    const int64_t *places;            /* R */
    const int16_t *owners;            /* R room: which beam's slot holds a row's token at each place */
    float *keys, *values;             /* B N room H*K: the room of this block */
    int64_t columns;                  /* S */
    const float *memory_keys, *memory_values; /* B H S K */
    const float *shade;                       /* B S: 0, or -inf where nothing may be seen */
    int64_t threads;
} Step;

typedef struct { /* room for what is between the matrices of a block */
    float *normed, *wide, *gated, *context, *scores;
    int64_t *offsets;
    void *rounded;
} Scratch;

static void normalise(const float *x, int64_t rows, int64_t width, const Norm *norm, float *y) {
    for (int64_t row = 0; row < rows; row++, x += width, y += width) {
        float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += x[i];
        float mean = sum / width;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; i++) squares += (x[i] - mean) * (x[i] - mean);
        float up = (float)(1.0 / sqrt(squares / width + norm->epsilon));
        for (int64_t i = 0; i < width; i++) y[i] = (x[i] - mean) * up;
        if (norm->weight) for (int64_t i = 0; i < width; i++) y[i] *= norm->weight[i];
        if (norm->bias) for (int64_t i = 0; i < width; i++) y[i] += norm->bias[i];
    }
}

INLINE float dot(const float *a, const float *b, int64_t width) {
    floats sum = every(0.0f);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) sum = fused(load(a + i), load(b + i), sum);
    float rest = 0;
    for (; i < width; i++) rest += a[i] * b[i];
    return total(sum) + rest;
}

/* scores -> softmax(scores), in place; whole groups of them */
INLINE void soften(float *scores, int64_t count) {
    floats high = load(scores), sums = every(0.0f);
    for (int64_t i = LANES; i < count; i += LANES) high = larger(high, load(scores + i));
    float most = largest(high);
    if (most == -INFINITY) most = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        floats one = exponentials(add(load(scores + i), every(-most)));
        store(scores + i, one);
        sums = add(sums, one);
    }
    floats down = every(1.0f / total(sums));
    for (int64_t i = 0; i < count; i += LANES) store(scores + i, times(load(scores + i), down));
}

/* softmax(scale q k + shade) v of one head of one row; key and value i begin at offsets[i]. Room for `scores`: a whole
   number of groups. */
INLINE void attend_to(const float *query, const float *keys, const float *values, const int64_t *offsets, int64_t count,
                      const float *shade, float scale, const int64_t width, float *scores, float *context) {
    int64_t wide = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = 0; width % LANES == 0 && i < count; i += 4) {
        floats sums[4] = {every(0.0f), every(0.0f), every(0.0f), every(0.0f)};
        const float *four[4]; /* behind the last one it comes again */
        for (int one = 0; one < 4; one++) four[one] = keys + offsets[i + one < count ? i + one : count - 1];
        for (int64_t at = 0; at < width; at += LANES) {
            floats part = load(query + at);
            for (int one = 0; one < 4; one++) sums[one] = fused(part, load(four[one] + at), sums[one]);
        }
        totals(sums, scores + i);
    }
    for (int64_t i = 0; width % LANES && i < count; i++) scores[i] = dot(query, keys + offsets[i], width);
    for (int64_t i = 0; i < count; i += LANES) { /* whole groups: single numbers take as long each */
        floats group = times(first(scores + i, count - i, -INFINITY), every(scale));
        store(scores + i, shade ? add(group, first(shade + i, count - i, 0.0f)) : group);
    }
    soften(scores, wide);
    int64_t at = 0;
    for (; at + 2 * LANES <= width; at += 2 * LANES) { /* sums of even and odd ones, so that none waits for the last */
        floats sums[4] = {every(0.0f), every(0.0f), every(0.0f), every(0.0f)};
        int64_t i = 0;
        for (; i + 2 <= count; i += 2)
            for (int v = 0; v < 4; v++) {
                const float *from = values + offsets[i + v / 2] + at + v % 2 * LANES;
                sums[v] = fused(every(scores[i + v / 2]), load(from), sums[v]);
            }
        for (; i < count; i++)
            for (int v = 0; v < 2; v++)
                sums[v] = fused(every(scores[i]), load(values + offsets[i] + at + v * LANES), sums[v]);
        for (int v = 0; v < 2; v++) store(context + at + v * LANES, add(sums[v], sums[v + 2]));
    }
    for (; at + LANES <= width; at += LANES) {
        floats sum = every(0.0f);
        for (int64_t i = 0; i < count; i++) sum = fused(every(scores[i]), load(values + offsets[i] + at), sum);
        store(context + at, sum);
    }
    for (; at < width; at++) {
        float sum = 0;
        for (int64_t i = 0; i < count; i++) sum += scores[i] * values[offsets[i] + at];
        context[at] = sum;
    }
}

/* Heads of the common widths by code of their own, in which nothing is left to count. */
static void attend(const float *query, const float *keys, const float *values, const int64_t *offsets, int64_t count,
                   const float *shade, float scale, int64_t width, float *scores, float *context) {
    if (width == 32) attend_to(query, keys, values, offsets, count, shade, scale, 32, scores, context);
    else if (width == 64) attend_to(query, keys, values, offsets, count, shade, scale, 64, scores, context);
    else attend_to(query, keys, values, offsets, count, shade, scale, width, scores, context);
}

INLINE int64_t row_of(const Step *step, int64_t one) { return step->which ? step->which[one] : one; }

/* New keys and values go to the slot of their row and place; a row reads, place by place, the slot of its owner. */
static void attend_back(const Block *block, const Step *step, int64_t first, int64_t rows, const Scratch *scratch) {
    int64_t heads = block->heads, width = block->head, size = heads * width, *offsets = scratch->offsets;
    for (int64_t one = 0; one < rows; one++) {
        const float *every_row = scratch->wide + 3 * one * size;
        int64_t row = row_of(step, first + one), place = step->places[row], begin = row / step->beams * step->beams;
        int64_t from = step->reach >= 0 && place > step->reach ? place - step->reach : 0, count = 0;
        int64_t slot = (row * step->room + place) * size;
        memcpy(step->keys + slot, every_row + size, size * sizeof(float));
        memcpy(step->values + slot, every_row + 2 * size, size * sizeof(float));
        for (int64_t at = from; at < place; at++) {
            int64_t owner = step->beams > 1 ? begin + step->owners[row * step->room + at] : row;
            offsets[count++] = (owner * step->room + at) * size;
        }
        offsets[count++] = slot;
        for (int64_t head = 0; head < heads; head++)
            attend(every_row + head * width, step->keys + head * width, step->values + head * width, offsets, count,
                   NULL, (float)block->scale, width, scratch->scores, scratch->context + one * size + head * width);
    }
}

/* Rows of one source read its keys head by head, so that they stay in the cache for all of them. */
static void attend_up(const Block *block, const Step *step, int64_t first, int64_t rows, const Scratch *scratch) {
    int64_t heads = block->heads, width = block->head, size = heads * width;
    for (int64_t i = 0; i < step->columns; i++) scratch->offsets[i] = i * width;
    for (int64_t one = 0, next; one < rows; one = next) {
        int64_t source = row_of(step, first + one) / step->beams;
        for (next = one + 1; next < rows && row_of(step, first + next) / step->beams == source;) next++;
        for (int64_t head = 0; head < heads; head++) {
            int64_t begin = (source * heads + head) * step->columns * width;
            for (int64_t row = one; row < next; row++)
                attend(scratch->wide + row * size + head * width, step->memory_keys + begin,
                       step->memory_values + begin, scratch->offsets, step->columns,
                       step->shade + source * step->columns, (float)block->memory_scale, width, scratch->scores,
                       scratch->context + row * size + head * width);
        }
    }
}

enum { RELU, GELU, GELU_TANH, SILU };

static void activate(float *x, int64_t count, int64_t kind) {
    for (int64_t i = 0; i < count; i++) {
        float one = x[i];
        if (kind == GELU) x[i] = 0.5f * one * (1.0f + erff(one * 0.70710678f));
        if (kind == GELU_TANH) x[i] = 0.5f * one * (1.0f + tanhf(0.79788456f * (one + 0.044715f * one * one * one)));
        if (kind == SILU) x[i] = one / (1.0f + expf(-one));
    }
}
