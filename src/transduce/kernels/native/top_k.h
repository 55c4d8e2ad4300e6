/* Top-k selection: the best scores of each row, and the best outputs of a linear layer without storing all of them. */

#define GROUP 256   /* scores skipped together when none is among the best */

static float max_of(const float *x, int64_t count) {
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < count; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* Inserts numbers into the `count` best so far, best first; of equal numbers the earlier one wins. Returns how many are
   held. */
static int64_t insert_best(const float *x, int64_t size, int64_t number, int64_t count, int64_t held, float *best,
                    int64_t *indices) {
    for (int64_t i = 0; i < size; i++) {
        while (held == count && i + LANES <= size && !any_above(load(x + i), best[count - 1])) i += LANES;
        if (i == size) break;
        if (held == count && !(x[i] > best[count - 1])) continue;
        int64_t at = held < count ? held++ : count - 1;
        for (; at > 0 && x[i] > best[at - 1]; at--) best[at] = best[at - 1], indices[at] = indices[at - 1];
        best[at] = x[i], indices[at] = number + i;
    }
    return held;
}

static void top_k_row(const float *x, int64_t size, int64_t count, float *best, int64_t *indices) {
    int64_t held = 0;
    for (int64_t from = 0; from < size; from += GROUP) {
        int64_t group = from + GROUP < size ? GROUP : size - from;
        if (held == count && !(max_of(x + from, group) > best[count - 1])) continue;
        held = insert_best(x + from, group, from, count, held, best, indices);
    }
}

void transduce_top_k(const float *x, int64_t rows, int64_t size, int64_t count, float *best, int64_t *indices) {
    for (int64_t row = 0; row < rows; row++)
        top_k_row(x + row * size, size, count, best + row * count, indices + row * count);
}

/* Shortlists: the target tokens each source may use. Other tokens are not computed and get no probability. */
typedef struct {
    const void *weights;    /* of the output layer, output-major, each row padded with 0 to whole vectors */
    const int32_t *tokens;  /* the lists one epilogue the other, each ascending */
    const int64_t *offsets; /* where each list begins, and where the last one ends */
    const int64_t *list_ids; /* B: the list of each source */
} Shortlists;

/* The `count` best next tokens of each row that are not suppressed, with their log-probabilities. */
typedef struct {
    int64_t count, num_suppressed;
    const int64_t *suppressed;
    float *log_probs; /* R count */
    int64_t *tokens;  /* R count */
    const Shortlists *shortlists; /* NULL: the whole vocabulary */
} TopKRequest;

typedef struct { /* online softmax of a row: sum = sum of e^(x - max); how many of the best are held */
    float max, sum;
    int64_t count;
} RunningSoftmax;

#define SPAN (4 * PANEL) /* scores of a row computed and scanned together, within the L1 cache */
#define ROW_BLOCK (2 * TILE_ROWS)

static void scan_scores(float *x, int64_t size, int64_t number, const TopKRequest *request, RunningSoftmax *running,
                        float *best, int64_t *tokens) {
    float high = max_of(x, size), most = high > running->max ? high : running->max, sum = 0;
    if (most == -INFINITY) most = 0;
    floats sums = broadcast(0.0f), down = broadcast(-most);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sums = add(sums, exp_lanes(add(load(x + i), down)));
    for (; i < size; i++) sum += fast_exp(x[i] - most);
    running->sum = reduce_add(sums) + sum + (running->count ? running->sum * fast_exp(running->max - most) : 0.0f);
    running->max = most;
    if (running->count == request->count && !(high > best[request->count - 1])) return;
    for (i = 0; i < request->num_suppressed; i++)
        if (request->suppressed[i] >= number && request->suppressed[i] < number + size)
            x[request->suppressed[i] - number] = -INFINITY;
    running->count = insert_best(x, size, number, request->count, running->count, best, tokens);
}

/* Outputs `begin` to `end` (panel boundaries) for all rows: each weight is read from memory once. */
static void scan_outputs(const Linear *m, int64_t begin, int64_t end, const float *x, const uint8_t *quantised,
                         const float *scales, int64_t rows, const TopKRequest *request, RunningSoftmax *running,
                         float *best, int64_t *tokens) {
    int64_t stride = quads_of(m) * 4, count = request->count;
    Epilogue epilogue = {0, NULL, 1};
    float made[ROW_BLOCK * SPAN];
    for (int64_t number = begin; number < end; number += SPAN) {
        Linear part = *m;
        part.outputs = end - number < SPAN ? end - number : SPAN;
        part.weights = m->int8 ? (const void *)((const int8_t *)m->weights + number * stride)
                                : (const void *)((const float *)m->weights + number * m->inputs);
        part.scales = m->scales ? m->scales + number : NULL;
        part.bias = m->bias ? m->bias + number : NULL;
        part.sums = m->sums ? m->sums + number : NULL;
        for (int64_t row = 0; row < rows; row += ROW_BLOCK) {
            int64_t few = rows - row < ROW_BLOCK ? rows - row : ROW_BLOCK;
            for (int64_t panel = 0; panel < panels_of(&part); panel++)
                linear_panel(&part, panel, x + row * m->inputs, quantised + row * stride, scales + row, few, made,
                             &epilogue);
            for (int64_t r = 0; r < few; r++)
                scan_scores(made + r * part.outputs, part.outputs, number, request, running + row + r,
                            best + (row + r) * count, tokens + (row + r) * count);
        }
    }
}

/* Top-k of log softmax(W x + b) without storing all outputs. Nonzero: out of memory. */
static int64_t top_k_all(const Linear *m, const float *x, int64_t rows, const TopKRequest *request, int64_t threads) {
    int64_t spans = (m->outputs + SPAN - 1) / SPAN, count = request->count;
    int64_t parts = m->inputs * m->outputs * (m->int8 ? 1 : 4) < SERIAL_BYTES || threads < 1 ? 1 : threads;
    parts = parts < spans ? parts : spans;
    int64_t held = parts * rows, room = SCRATCH_BYTES(m, rows);
    char *memory = malloc(held * (sizeof(RunningSoftmax) + count * 12) + room + 64);
    if (!memory) return 1;
    int64_t *tokens = (int64_t *)memory;
    RunningSoftmax *running = (RunningSoftmax *)(tokens + held * count);
    float *best = (float *)(running + held), *scales = best + held * count;
    uint8_t *quantised = (uint8_t *)(scales + rows);
    if (m->int8) quantise_rows(x, rows, m->inputs, quantised, quads_of(m) * 4, scales);
    for (int64_t i = 0; i < held; i++) running[i] = (RunningSoftmax){-INFINITY, 0.0f, 0};
#ifdef _OPENMP
#pragma omp parallel for if (parts > 1) num_threads(parts) schedule(static)
#endif
    for (int64_t part = 0; part < parts; part++) {
        int64_t begin = part * spans / parts * SPAN, end = (part + 1) * spans / parts * SPAN, at = part * rows;
        scan_outputs(m, begin, end < m->outputs ? end : m->outputs, x, quantised, scales, rows, request, running + at,
                 best + at * count, tokens + at * count);
    }
    for (int64_t row = 0; row < rows; row++) {
        float *to = request->log_probs + row * count, high = -INFINITY, sum = 0;
        int64_t *numbers = request->tokens + row * count, kept = 0;
        for (int64_t at = row; at < held; at += rows) high = running[at].max > high ? running[at].max : high;
        for (int64_t at = row; at < held; at += rows) {
            sum += running[at].sum * fast_exp(running[at].max - high);
            for (int64_t i = 0; i < running[at].count; i++) { /* parts are in token order */
                int64_t before = kept;
                kept = insert_best(best + at * count + i, 1, tokens[at * count + i], count, kept, to, numbers);
                if (before == count && !(best[at * count + i] >= to[count - 1])) break;
            }
        }
        for (int64_t i = 0; i < kept; i++) to[i] = (to[i] - high) - logf(sum);
        for (int64_t i = kept; i < count; i++) to[i] = -INFINITY, numbers[i] = 0; /* fewer than requested */
    }
    free(memory);
    return 0;
}
