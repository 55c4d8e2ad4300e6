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

/* Where the rows of a step stand: R = sources * beams of them. */
typedef struct {
    int64_t rows, beams, room, reach; /* reach < 0: all that came before */
    const int64_t *places;            /* R */
    const int16_t *owners;            /* R room: which beam's slot holds a row's token at each place */
    float *keys, *values;             /* B N room H*K: the room of this block */
    int64_t columns;                  /* S */
    const float *memory_keys, *memory_values; /* B H S K */
    const float *shade;                       /* B S: 0, or -inf where nothing may be seen */
    int64_t threads;
} Step;

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

/* scores -> softmax(scores), in place */
static void soften(float *scores, int64_t count) {
    float most = -INFINITY, sum = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < count; i++) most = scores[i] > most ? scores[i] : most;
    if (most == -INFINITY) most = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) {
        float one = scores[i] == -INFINITY ? 0.0f : exponential(scores[i] - most);
        scores[i] = one;
        sum += one;
    }
    float down = 1.0f / sum;
    for (int64_t i = 0; i < count; i++) scores[i] *= down;
}

/* softmax(scale q k + shade) v of one head of one row; key and value i begin at offsets[i]. */
static void attend(const float *query, const float *keys, const float *values, const int64_t *offsets, int64_t count,
                   const float *shade, float scale, int64_t width, float *scores, float *context) {
    for (int64_t i = 0; i < count; i++) scores[i] = dot(query, keys + offsets[i], width) * scale + (shade ? shade[i] : 0.0f);
    soften(scores, count);
    int64_t at = 0;
    for (; at + 4 * LANES <= width; at += 4 * LANES) {
        floats sums[4] = {every(0.0f), every(0.0f), every(0.0f), every(0.0f)};
        for (int64_t i = 0; i < count; i++)
            for (int v = 0; v < 4; v++)
                sums[v] = fused(every(scores[i]), load(values + offsets[i] + at + v * LANES), sums[v]);
        for (int v = 0; v < 4; v++) store(context + at + v * LANES, sums[v]);
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

/* New keys and values go to the slot of their row and place; a row reads, place by place, the slot of its owner. */
static void attend_back(const Block *block, const Step *step, const float *every_row, float *context, int64_t *offsets,
                        float *scores) {
    int64_t heads = block->heads, width = block->head, size = heads * width;
    for (int64_t row = 0; row < step->rows; row++) {
        int64_t slot = (row * step->room + step->places[row]) * size;
        memcpy(step->keys + slot, every_row + (3 * row + 1) * size, size * sizeof(float));
        memcpy(step->values + slot, every_row + (3 * row + 2) * size, size * sizeof(float));
    }
    for (int64_t row = 0; row < step->rows; row++) {
        int64_t place = step->places[row], first = row / step->beams * step->beams, count = 0;
        int64_t from = step->reach >= 0 && place > step->reach ? place - step->reach : 0;
        for (int64_t at = from; at <= place; at++) {
            int64_t owner = step->beams > 1 ? first + step->owners[row * step->room + at] : row;
            offsets[count++] = (owner * step->room + at) * size;
        }
        for (int64_t head = 0; head < heads; head++)
            attend(every_row + 3 * row * size + head * width, step->keys + head * width, step->values + head * width,
                   offsets, count, NULL, (float)block->scale, width, scores, context + row * size + head * width);
    }
}

static void attend_up(const Block *block, const Step *step, const float *queries, float *context, int64_t *offsets,
                      float *scores) {
    int64_t heads = block->heads, width = block->head, size = heads * width;
    for (int64_t i = 0; i < step->columns; i++) offsets[i] = i * width;
    for (int64_t source = 0; source < step->rows / step->beams; source++)
        for (int64_t head = 0; head < heads; head++) {
            int64_t begin = (source * heads + head) * step->columns * width;
            for (int64_t row = source * step->beams; row < (source + 1) * step->beams; row++)
                attend(queries + row * size + head * width, step->memory_keys + begin, step->memory_values + begin,
                       offsets, step->columns, step->shade + source * step->columns, (float)block->memory_scale, width,
                       scores, context + row * size + head * width);
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
