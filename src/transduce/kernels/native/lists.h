/* Rows and a list of outputs for each source in, the best of each row's own list out: no other output is computed. */

/* Numbers of a row, filled up: groups of floats, or of 8-bit inputs by fours. */
INLINE int64_t filled(const Matrix *m) {
    int64_t group = m->whole ? 4 * LANES : LANES;
    return (m->inputs + group - 1) / group * group;
}

/* The sums of `tall` rows with four outputs. All of a row lies in one stretch, so one pass reads whole cache lines. */
INLINE void whole_four(const int tall, const uint8_t *x, int64_t wide, const void *const four[4], int32_t *to) {
    wholes sums[TALL][4];
    for (int r = 0; r < tall; r++)
        for (int o = 0; o < 4; o++) sums[r][o] = no_sums();
    for (int64_t k = 0; k < wide; k += 4 * LANES) {
        wholes read[4];
        for (int o = 0; o < 4; o++) read[o] = load_weights((const int8_t *)four[o] + k);
        for (int r = 0; r < tall; r++) {
            wholes inputs = load_weights((const int8_t *)x + r * wide + k);
            for (int o = 0; o < 4; o++) sums[r][o] = dot4(sums[r][o], inputs, read[o]);
        }
    }
    for (int r = 0; r < tall; r++) whole_totals(sums[r], to + r * SPAN);
}

INLINE void float_four(const int tall, const float *x, int64_t wide, const void *const four[4], float *to) {
    floats sums[TALL][4];
    for (int r = 0; r < tall; r++)
        for (int o = 0; o < 4; o++) sums[r][o] = every(0.0f);
    for (int64_t k = 0; k < wide; k += LANES) {
        floats read[4];
        for (int o = 0; o < 4; o++) read[o] = load((const float *)four[o] + k);
        for (int r = 0; r < tall; r++) {
            floats inputs = load(x + r * wide + k);
            for (int o = 0; o < 4; o++) sums[r][o] = fused(inputs, read[o], sums[r][o]);
        }
    }
    for (int r = 0; r < tall; r++) totals(sums[r], to + r * SPAN);
}

/* The sums of `tall` rows with so many outputs (SPAN at most) into `to`, one row after SPAN of the one before. */
INLINE void sum_span(const int tall, const Matrix *m, const Lists *lists, const void *x, const int32_t *outputs,
                     int64_t count, void *to) {
    int64_t wide = filled(m), bytes = wide * (m->whole ? 1 : 4);
    for (int64_t i = 0; i < count; i += 4) {
        const void *four[4];
        for (int o = 0; o < 4; o++) /* behind the last one it comes again, into room that nobody reads */
            four[o] = (const char *)lists->weights + outputs[i + o < count ? i + o : count - 1] * bytes;
        if (m->whole) whole_four(tall, x, wide, four, (int32_t *)to + i);
        else float_four(tall, x, wide, four, (float *)to + i);
    }
}

#define SPANS(tall)                                                                                           \
    static __attribute__((noinline)) void sum_span_##tall(const Matrix *m, const Lists *lists, const void *x, \
                                                          const int32_t *outputs, int64_t count, void *to) {  \
        sum_span(tall, m, lists, x, outputs, count, to);                                                      \
    }
SPANS(1)
SPANS(2)
#if TALL > 2
SPANS(3)
SPANS(4)
SPANS(5)
SPANS(6)
#endif

typedef void (*Summing)(const Matrix *, const Lists *, const void *, const int32_t *, int64_t, void *);
#if TALL > 2
static const Summing summing[TALL] = {sum_span_1, sum_span_2, sum_span_3, sum_span_4, sum_span_5, sum_span_6};
#else
static const Summing summing[TALL] = {sum_span_1, sum_span_2};
#endif

/* The best of one list for `tall` rows of its source. */
static void see_list(const Matrix *m, int64_t list, const void *x, const float *scales, int64_t tall,
                     const Wanted *wanted, int64_t row) {
    const Lists *lists = wanted->lists;
    const int32_t *outputs = lists->outputs + lists->begins[list];
    int64_t size = lists->begins[list + 1] - lists->begins[list], count = wanted->count;
    float *best = wanted->best + row * count;
    int64_t *tokens = wanted->tokens + row * count;
    Seen seen[TALL];
    for (int64_t r = 0; r < tall; r++) seen[r] = (Seen){-INFINITY, 0.0f, 0};
    for (int64_t number = 0; number < size; number += SPAN, outputs += SPAN) {
        int64_t few = size - number < SPAN ? size - number : SPAN;
        union { float real[TALL * SPAN]; int32_t whole[TALL * SPAN]; } sums;
        float made[SPAN], bias[SPAN], scale[SPAN];
        int32_t shift[SPAN];
        for (int64_t i = 0; i < few; i++) bias[i] = m->bias ? m->bias[outputs[i]] : 0.0f;
        if (m->whole)
            for (int64_t i = 0; i < few; i++) {
                scale[i] = m->scales[outputs[i]];
                shift[i] = SHIFT ? m->sums[outputs[i]] : 0;
            }
        summing[tall - 1](m, lists, x, outputs, few, &sums);
        for (int64_t r = 0; r < tall; r++) {
            const float *from = sums.real + r * SPAN;
            const int32_t *whole = sums.whole + r * SPAN;
            if (m->whole)
                for (int64_t i = 0; i < few; i++)
                    made[i] = (float)(whole[i] + shift[i]) * scales[r] * scale[i] + bias[i];
            else
                for (int64_t i = 0; i < few; i++) made[i] = from[i] + bias[i];
            see(made, few, number, wanted, seen + r, best + r * count, tokens + r * count);
        }
    }
    outputs = lists->outputs + lists->begins[list];
    for (int64_t r = 0; r < tall; r++, best += count, tokens += count) {
        float high = seen[r].most, down = logf(seen[r].sum);
        for (int64_t i = 0; i < seen[r].held; i++) best[i] = (best[i] - high) - down, tokens[i] = outputs[tokens[i]];
        for (int64_t i = seen[r].held; i < count; i++) best[i] = -INFINITY, tokens[i] = 0;
    }
}

/* Where a token stands in a list; -1: it does not. */
static int64_t place_of(const Lists *lists, int64_t list, int64_t token) {
    int64_t low = lists->begins[list], high = lists->begins[list + 1], begin = low;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (lists->outputs[middle] < token) low = middle + 1;
        else high = middle;
    }
    return low < lists->begins[list + 1] && lists->outputs[low] == token ? low - begin : -1;
}

INLINE int64_t source_of(const Step *step, int64_t row) { return step ? row_of(step, row) / step->beams : row; }

/* log softmax over each row's own list, of its best. No step: each row is a source. Nonzero: no memory. */
static int64_t find_listed(const Matrix *m, const float *x, int64_t rows, const Wanted *wanted, const Step *step,
                           int64_t threads) {
    int64_t wide = filled(m), bytes = wide * (m->whole ? 1 : 4), bans = wanted->bans, groups = 0;
    char *memory = malloc((rows * (bans + 1) + 1) * 8 + rows * (bytes + 4) + 64);
    if (!memory) return 1;
    int64_t *places = (int64_t *)(void *)memory, *firsts = places + rows * bans;
    float *scales = (float *)(void *)(firsts + rows + 1);
    char *read = (char *)(scales + rows);
    if (m->whole) round_rows(x, rows, m->inputs, (uint8_t *)read, wide, scales);
    for (int64_t row = 0; !m->whole && row < rows; row++) {
        memcpy(read + row * bytes, x + row * m->inputs, m->inputs * 4);
        memset(read + row * bytes + m->inputs * 4, 0, bytes - m->inputs * 4);
    }
    for (int64_t row = 0, next; row < rows; row = next) { /* rows of one source read its weights together */
        for (next = row + 1; next < rows && next < row + TALL && source_of(step, next) == source_of(step, row);) next++;
        firsts[groups++] = row;
    }
    firsts[groups] = rows;
#ifdef _OPENMP
#pragma omp parallel for if (threads > 1 && groups > threads) num_threads(threads) schedule(static)
#endif
    for (int64_t group = 0; group < groups; group++) {
        int64_t row = firsts[group], list = wanted->lists->which[source_of(step, row)];
        Wanted here = *wanted;
        here.banned = places + group * bans;
        for (int64_t i = 0; i < bans; i++) places[group * bans + i] = place_of(wanted->lists, list, wanted->banned[i]);
        see_list(m, list, read + row * bytes, scales + row, firsts[group + 1] - row, &here, row);
    }
    free(memory);
    return 0;
}

static int64_t find(const Matrix *m, const float *x, int64_t rows, const Wanted *wanted, const Step *step,
                    int64_t threads) {
    return wanted->lists ? find_listed(m, x, rows, wanted, step, threads) : find_best(m, x, rows, wanted, threads);
}

/* The same for rows (R D) as they are, each a source of its own. */
int64_t transduce_best(const Matrix *m, const float *x, int64_t rows, const Wanted *wanted, int64_t threads) {
    return find(m, x, rows, wanted, NULL, threads);
}
