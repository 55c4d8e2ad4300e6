/* Scores of a vocabulary in, the best of each row out. */

#define GROUP 256   /* numbers that are passed over together where none is among the best */

static float greatest(const float *x, int64_t count) {
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < count; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* Takes numbers into the `count` best so far, best first, the earlier of two that are equal; gives how many are held. */
static int64_t take(const float *x, int64_t size, int64_t number, int64_t count, int64_t held, float *best,
                    int64_t *places) {
    for (int64_t i = 0; i < size; i++) {
        while (held == count && i + LANES <= size && !any_above(load(x + i), best[count - 1])) i += LANES;
        if (i == size) break;
        if (held == count && !(x[i] > best[count - 1])) continue;
        int64_t at = held < count ? held++ : count - 1;
        for (; at > 0 && x[i] > best[at - 1]; at--) best[at] = best[at - 1], places[at] = places[at - 1];
        best[at] = x[i], places[at] = number + i;
    }
    return held;
}

static void top_row(const float *x, int64_t size, int64_t count, float *best, int64_t *places) {
    int64_t held = 0;
    for (int64_t from = 0; from < size; from += GROUP) {
        int64_t group = from + GROUP < size ? GROUP : size - from;
        if (held == count && !(greatest(x + from, group) > best[count - 1])) continue;
        held = take(x + from, group, from, count, held, best, places);
    }
}

void transduce_top(const float *x, int64_t rows, int64_t size, int64_t count, float *best, int64_t *places) {
    for (int64_t row = 0; row < rows; row++)
        top_row(x + row * size, size, count, best + row * count, places + row * count);
}

/* What each source may be answered with: nothing else is looked at, nor counts in the probabilities. */
typedef struct {
    const void *weights;    /* those of the matrix, output by output, each filled up with 0 to whole groups */
    const int32_t *outputs; /* the lists, one after the other, each in order */
    const int64_t *begins;  /* of each list, and where the last one ends */
    const int64_t *which;   /* B: the list of each source */
} Lists;

/* What is asked of the scores of every next token: the best of those that are not banned, by their log-probability. */
typedef struct {
    int64_t count, bans;
    const int64_t *banned;
    float *best;     /* R count */
    int64_t *tokens; /* R count */
    const Lists *lists; /* NULL: every token may be said */
} Wanted;

typedef struct { /* of a row, while its scores come by: sum = sum of e^(x - most) */
    float most, sum;
    int64_t held;
} Seen;

#define SPAN (4 * PANEL) /* scores of a row that are made and read together, and never leave the nearest cache */
#define FEW (2 * TALL)   /* rows of them */

static void see(float *x, int64_t size, int64_t number, const Wanted *wanted, Seen *seen, float *best, int64_t *tokens) {
    float high = greatest(x, size), most = high > seen->most ? high : seen->most, sum = 0;
    if (most == -INFINITY) most = 0;
    floats sums = every(0.0f), down = every(-most);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sums = add(sums, exponentials(add(load(x + i), down)));
    for (; i < size; i++) sum += exponential(x[i] - most);
    seen->sum = total(sums) + sum + (seen->held ? seen->sum * exponential(seen->most - most) : 0.0f);
    seen->most = most;
    if (seen->held == wanted->count && !(high > best[wanted->count - 1])) return;
    for (i = 0; i < wanted->bans; i++)
        if (wanted->banned[i] >= number && wanted->banned[i] < number + size) x[wanted->banned[i] - number] = -INFINITY;
    seen->held = take(x, size, number, wanted->count, seen->held, best, tokens);
}

/* The outputs from `begin` to `end`, which begin panels, for all rows: each weight comes from memory once. */
static void see_part(const Matrix *m, int64_t begin, int64_t end, const float *x, const uint8_t *whole,
                     const float *scales, int64_t rows, const Wanted *wanted, Seen *seen, float *best, int64_t *tokens) {
    int64_t stride = fours_of(m) * 4, count = wanted->count;
    After after = {0, NULL, 1};
    float made[FEW * SPAN];
    for (int64_t number = begin; number < end; number += SPAN) {
        Matrix part = *m;
        part.outputs = end - number < SPAN ? end - number : SPAN;
        part.weights = m->whole ? (const void *)((const int8_t *)m->weights + number * stride)
                                : (const void *)((const float *)m->weights + number * m->inputs);
        part.scales = m->scales ? m->scales + number : NULL;
        part.bias = m->bias ? m->bias + number : NULL;
        part.sums = m->sums ? m->sums + number : NULL;
        for (int64_t row = 0; row < rows; row += FEW) {
            int64_t few = rows - row < FEW ? rows - row : FEW;
            for (int64_t panel = 0; panel < panels_of(&part); panel++)
                read_panel(&part, panel, x + row * m->inputs, whole + row * stride, scales + row, few, made, &after);
            for (int64_t r = 0; r < few; r++)
                see(made + r * part.outputs, part.outputs, number, wanted, seen + row + r, best + (row + r) * count,
                    tokens + (row + r) * count);
        }
    }
}

/* log softmax(W x + b) of the best outputs of each row, which are never all in memory. Nonzero: there is none. */
static int64_t find_best(const Matrix *m, const float *x, int64_t rows, const Wanted *wanted, int64_t threads) {
    int64_t spans = (m->outputs + SPAN - 1) / SPAN, count = wanted->count;
    int64_t parts = m->inputs * m->outputs * (m->whole ? 1 : 4) < SMALL || threads < 1 ? 1 : threads;
    parts = parts < spans ? parts : spans;
    int64_t held = parts * rows, room = ROOM(m, rows);
    char *memory = malloc(held * (sizeof(Seen) + count * 12) + room + 64);
    if (!memory) return 1;
    int64_t *tokens = (int64_t *)memory;
    Seen *seen = (Seen *)(tokens + held * count);
    float *best = (float *)(seen + held), *scales = best + held * count;
    uint8_t *whole = (uint8_t *)(scales + rows);
    if (m->whole) round_rows(x, rows, m->inputs, whole, fours_of(m) * 4, scales);
    for (int64_t i = 0; i < held; i++) seen[i] = (Seen){-INFINITY, 0.0f, 0};
#ifdef _OPENMP
#pragma omp parallel for if (parts > 1) num_threads(parts) schedule(static)
#endif
    for (int64_t part = 0; part < parts; part++) {
        int64_t begin = part * spans / parts * SPAN, end = (part + 1) * spans / parts * SPAN, at = part * rows;
        see_part(m, begin, end < m->outputs ? end : m->outputs, x, whole, scales, rows, wanted, seen + at,
                 best + at * count, tokens + at * count);
    }
    for (int64_t row = 0; row < rows; row++) {
        float *to = wanted->best + row * count, high = -INFINITY, sum = 0;
        int64_t *numbers = wanted->tokens + row * count, kept = 0;
        for (int64_t at = row; at < held; at += rows) high = seen[at].most > high ? seen[at].most : high;
        for (int64_t at = row; at < held; at += rows) {
            sum += seen[at].sum * exponential(seen[at].most - high);
            for (int64_t i = 0; i < seen[at].held; i++) { /* the tokens of a part come after those of the one before */
                int64_t before = kept;
                kept = take(best + at * count + i, 1, tokens[at * count + i], count, kept, to, numbers);
                if (before == count && !(best[at * count + i] >= to[count - 1])) break;
            }
        }
        for (int64_t i = 0; i < kept; i++) to[i] = (to[i] - high) - logf(sum);
        for (int64_t i = kept; i < count; i++) to[i] = -INFINITY, numbers[i] = 0; /* fewer than were asked for */
    }
    free(memory);
    return 0;
}
