/* Top-k over a shortlist of outputs per source: only the outputs on the list are computed. */

/* Inputs of a row, padded to whole vectors of fp32 or int8 numbers. */
INLINE int64_t padded_inputs(const Linear *m) {
    int64_t group = m->int8 ? 4 * LANES : LANES;
    return (m->inputs + group - 1) / group * group;
}

/* Dot products of `tall` rows with four outputs. Weights are output-major here, so each output is read contiguously. */
INLINE void int8_dot4(const int tall, const uint8_t *x, int64_t wide, const void *const four[4], int32_t *to) {
    ints sums[TILE_ROWS][4];
    for (int r = 0; r < tall; r++)
        for (int o = 0; o < 4; o++) sums[r][o] = zero_ints();
    for (int64_t k = 0; k < wide; k += 4 * LANES) {
        ints read[4];
        for (int o = 0; o < 4; o++) read[o] = load_weights((const int8_t *)four[o] + k);
        for (int r = 0; r < tall; r++) {
            ints inputs = load_weights((const int8_t *)x + r * wide + k);
            for (int o = 0; o < 4; o++) sums[r][o] = dot4(sums[r][o], inputs, read[o]);
        }
    }
    for (int r = 0; r < tall; r++) int_reduce_add4(sums[r], to + r * SPAN);
}

INLINE void fp32_dot4(const int tall, const float *x, int64_t wide, const void *const four[4], float *to) {
    floats sums[TILE_ROWS][4];
    for (int r = 0; r < tall; r++)
        for (int o = 0; o < 4; o++) sums[r][o] = broadcast(0.0f);
    for (int64_t k = 0; k < wide; k += LANES) {
        floats read[4];
        for (int o = 0; o < 4; o++) read[o] = load((const float *)four[o] + k);
        for (int r = 0; r < tall; r++) {
            floats inputs = load(x + r * wide + k);
            for (int o = 0; o < 4; o++) sums[r][o] = fma_lanes(inputs, read[o], sums[r][o]);
        }
    }
    for (int r = 0; r < tall; r++) reduce_add4(sums[r], to + r * SPAN);
}

/* Dot products of `tall` rows with `count` outputs (at most SPAN), written with a row stride of SPAN. */
INLINE void dot_span(const int tall, const Linear *m, const Shortlists *shortlists, const void *x, const int32_t *outputs,
                     int64_t count, void *to) {
    int64_t wide = padded_inputs(m), bytes = wide * (m->int8 ? 1 : 4);
    for (int64_t i = 0; i < count; i += 4) {
        const void *four[4];
        for (int o = 0; o < 4; o++) /* the last output fills an incomplete group; its extra results are ignored */
            four[o] = (const char *)shortlists->weights + outputs[i + o < count ? i + o : count - 1] * bytes;
        if (m->int8) int8_dot4(tall, x, wide, four, (int32_t *)to + i);
        else fp32_dot4(tall, x, wide, four, (float *)to + i);
    }
}

#define DOT_SPANS(tall)                                                                                           \
    static __attribute__((noinline)) void dot_span_##tall(const Linear *m, const Shortlists *shortlists, const void *x, \
                                                          const int32_t *outputs, int64_t count, void *to) {  \
        dot_span(tall, m, shortlists, x, outputs, count, to);                                                      \
    }
DOT_SPANS(1)
DOT_SPANS(2)
#if TILE_ROWS > 2
DOT_SPANS(3)
DOT_SPANS(4)
DOT_SPANS(5)
DOT_SPANS(6)
#endif

typedef void (*DotSpan)(const Linear *, const Shortlists *, const void *, const int32_t *, int64_t, void *);
#if TILE_ROWS > 2
static const DotSpan dot_spans[TILE_ROWS] = {dot_span_1, dot_span_2, dot_span_3, dot_span_4, dot_span_5, dot_span_6};
#else
static const DotSpan dot_spans[TILE_ROWS] = {dot_span_1, dot_span_2};
#endif

/* Top-k of one list for `tall` rows of its source. */
static void top_k_list(const Linear *m, int64_t list, const void *x, const float *scales, int64_t tall,
                     const TopKRequest *request, int64_t row) {
    const Shortlists *shortlists = request->shortlists;
    const int32_t *outputs = shortlists->tokens + shortlists->offsets[list];
    int64_t size = shortlists->offsets[list + 1] - shortlists->offsets[list], count = request->count;
    float *best = request->log_probs + row * count;
    int64_t *tokens = request->tokens + row * count;
    RunningSoftmax running[TILE_ROWS];
    for (int64_t r = 0; r < tall; r++) running[r] = (RunningSoftmax){-INFINITY, 0.0f, 0};
    for (int64_t number = 0; number < size; number += SPAN, outputs += SPAN) {
        int64_t few = size - number < SPAN ? size - number : SPAN;
        union { float real[TILE_ROWS * SPAN]; int32_t whole[TILE_ROWS * SPAN]; } sums;
        float made[SPAN], bias[SPAN], scale[SPAN];
        int32_t shift[SPAN];
        for (int64_t i = 0; i < few; i++) bias[i] = m->bias ? m->bias[outputs[i]] : 0.0f;
        if (m->int8)
            for (int64_t i = 0; i < few; i++) {
                scale[i] = m->scales[outputs[i]];
                shift[i] = ZERO_POINT ? m->sums[outputs[i]] : 0;
            }
        dot_spans[tall - 1](m, shortlists, x, outputs, few, &sums);
        for (int64_t r = 0; r < tall; r++) {
            const float *from = sums.real + r * SPAN;
            const int32_t *whole = sums.whole + r * SPAN;
            if (m->int8)
                for (int64_t i = 0; i < few; i++)
                    made[i] = (float)(whole[i] + shift[i]) * scales[r] * scale[i] + bias[i];
            else
                for (int64_t i = 0; i < few; i++) made[i] = from[i] + bias[i];
            scan_scores(made, few, number, request, running + r, best + r * count, tokens + r * count);
        }
    }
    outputs = shortlists->tokens + shortlists->offsets[list];
    for (int64_t r = 0; r < tall; r++, best += count, tokens += count) {
        float high = running[r].max, down = logf(running[r].sum);
        for (int64_t i = 0; i < running[r].count; i++) best[i] = (best[i] - high) - down, tokens[i] = outputs[tokens[i]];
        for (int64_t i = running[r].count; i < count; i++) best[i] = -INFINITY, tokens[i] = 0;
    }
}

/* Index of a token in a list; -1: not in it. */
static int64_t index_in_list(const Shortlists *shortlists, int64_t list, int64_t token) {
    int64_t low = shortlists->offsets[list], high = shortlists->offsets[list + 1], begin = low;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (shortlists->tokens[middle] < token) low = middle + 1;
        else high = middle;
    }
    return low < shortlists->offsets[list + 1] && shortlists->tokens[low] == token ? low - begin : -1;
}

INLINE int64_t source_of(const Step *step, int64_t row) { return step ? row_of(step, row) / step->beams : row; }

/* Top-k of log softmax over the list of each row. Without a step, each row is a source. Nonzero: out of memory. */
static int64_t top_k_shortlists(const Linear *m, const float *x, int64_t rows, const TopKRequest *request,
                                const Step *step,
                           int64_t threads) {
    int64_t wide = padded_inputs(m), bytes = wide * (m->int8 ? 1 : 4), num_suppressed = request->num_suppressed, groups = 0;
    char *memory = malloc((rows * (num_suppressed + 1) + 1) * 8 + rows * (bytes + 4) + 64);
    if (!memory) return 1;
    int64_t *indices = (int64_t *)(void *)memory, *firsts = indices + rows * num_suppressed;
    float *scales = (float *)(void *)(firsts + rows + 1);
    char *read = (char *)(scales + rows);
    if (m->int8) quantise_rows(x, rows, m->inputs, (uint8_t *)read, wide, scales);
    for (int64_t row = 0; !m->int8 && row < rows; row++) {
        memcpy(read + row * bytes, x + row * m->inputs, m->inputs * 4);
        memset(read + row * bytes + m->inputs * 4, 0, bytes - m->inputs * 4);
    }
    for (int64_t row = 0, next; row < rows; row = next) { /* rows of one source share its weights */
        for (next = row + 1; next < rows && next < row + TILE_ROWS && source_of(step, next) == source_of(step, row);) next++;
        firsts[groups++] = row;
    }
    firsts[groups] = rows;
#ifdef _OPENMP
#pragma omp parallel for if (threads > 1 && groups > threads) num_threads(threads) schedule(static)
#endif
    for (int64_t group = 0; group < groups; group++) {
        int64_t row = firsts[group], list = request->shortlists->list_ids[source_of(step, row)];
        TopKRequest here = *request;
        here.suppressed = indices + group * num_suppressed;
        for (int64_t i = 0; i < num_suppressed; i++)
            indices[group * num_suppressed + i] = index_in_list(request->shortlists, list, request->suppressed[i]);
        top_k_list(m, list, read + row * bytes, scales + row, firsts[group + 1] - row, &here, row);
    }
    free(memory);
    return 0;
}

static int64_t top_k_linear(const Linear *m, const float *x, int64_t rows, const TopKRequest *request, const Step *step,
                    int64_t threads) {
    if (request->shortlists) return top_k_shortlists(m, x, rows, request, step, threads);
    return top_k_all(m, x, rows, request, threads);
}

/* Top-k of a linear layer for rows (R D), each a source of its own. */
int64_t transduce_linear_top_k(const Linear *m, const float *x, int64_t rows, const TopKRequest *request, int64_t threads) {
    return top_k_linear(m, x, rows, request, NULL, threads);
}
