/* Rows in, W x + b out, for weights that lie in panels of PANEL outputs, input by input: each is read once for TALL rows. */

#define PANEL (4 * LANES)

typedef struct {
    const void *weights;
    const float *scales; /* 8 bits: one an output */
    const float *bias;
    const int32_t *sums; /* 8 bits: -SHIFT times the sum of an output's weights */
    int64_t inputs, outputs;
    int64_t whole; /* 8 bits; else fp32 */
} Matrix;

typedef struct {
    int64_t rectified;     /* max(0, .) */
    const float *residual; /* added last; NULL: none */
    int64_t threads;
} After;

INLINE int64_t panels_of(const Matrix *m) { return (m->outputs + PANEL - 1) / PANEL; }
INLINE int64_t fours_of(const Matrix *m) { return (m->inputs + 3) / 4; }

/* x = s q with q = round(x / s) and s = max|x| / 127, each row for itself: its neighbours cannot change it. */
static void round_rows(const float *x, int64_t rows, int64_t inputs, uint8_t *to, int64_t stride, float *scales) {
    int64_t whole = inputs / LANES * LANES;
    for (int64_t row = 0; row < rows; row++, x += inputs, to += stride) {
        floats most = every(0.0f);
        for (int64_t i = 0; i < whole; i += LANES) most = larger(most, size_of(load(x + i)));
        float top = largest(most);
        for (int64_t i = whole; i < inputs; i++) top = fabsf(x[i]) > top ? fabsf(x[i]) : top;
        float up = top > 0 ? 127.0f / top : 0.0f;
        scales[row] = top / 127.0f;
        for (int64_t i = 0; i < whole; i += LANES) round_group(times(load(x + i), every(up)), to + i);
        for (int64_t i = whole; i < inputs; i++) to[i] = (uint8_t)(int8_t)(lrintf(x[i] * up) + SHIFT);
        for (int64_t i = inputs; i < stride; i++) to[i] = 0; /* its weights are 0 */
    }
}

/* What follows a sum: bias, rectifier, residual. A panel that is not full goes through a small buffer. */
INLINE void finish(floats made[4], const Matrix *m, int64_t first, int64_t row, float *y, const After *after) {
    int64_t at = row * m->outputs + first;
    int full = first + PANEL <= m->outputs;
    float part[PANEL], *to = full ? y + at : part;
    for (int v = 0; v < 4; v++) {
        if (m->bias) made[v] = add(made[v], load(m->bias + first + v * LANES));
        if (after->rectified) made[v] = larger(made[v], every(0.0f));
        if (after->residual && full) made[v] = add(made[v], load(after->residual + at + v * LANES));
        store(to + v * LANES, made[v]);
    }
    if (!full)
        for (int64_t i = 0; i < m->outputs - first; i++) y[at + i] = part[i] + (after->residual ? after->residual[at + i] : 0);
}

INLINE void whole_tile(const int tall, const Matrix *m, int64_t panel, const uint8_t *x, const float *scales,
                       int64_t row, float *y, const After *after) {
    int64_t fours = fours_of(m), first = panel * PANEL;
    const int8_t *weights = (const int8_t *)m->weights + first * fours * 4;
    wholes sums[TALL][4];
    for (int r = 0; r < tall; r++)
        for (int v = 0; v < 4; v++) sums[r][v] = SHIFT ? load_sums(m->sums + first + v * LANES) : no_sums();
    for (int64_t k = 0; k < fours; k++, weights += 4 * PANEL) {
        wholes read[4];
        for (int v = 0; v < 4; v++) read[v] = load_weights(weights + v * 4 * LANES);
        for (int r = 0; r < tall; r++) {
            wholes four = every_four(x + (r * fours + k) * 4);
            for (int v = 0; v < 4; v++) sums[r][v] = dot4(sums[r][v], four, read[v]);
        }
    }
    for (int r = 0; r < tall; r++) {
        floats made[4];
        for (int v = 0; v < 4; v++)
            made[v] = times(times(as_floats(sums[r][v]), every(scales[r])), load(m->scales + first + v * LANES));
        finish(made, m, first, row + r, y, after);
    }
}

INLINE void float_tile(const int tall, const Matrix *m, int64_t panel, const float *x, int64_t row, float *y,
                       const After *after) {
    int64_t first = panel * PANEL;
    const float *weights = (const float *)m->weights + first * m->inputs;
    floats sums[TALL][4];
    for (int r = 0; r < tall; r++)
        for (int v = 0; v < 4; v++) sums[r][v] = every(0.0f);
    for (int64_t k = 0; k < m->inputs; k++, weights += PANEL) {
        floats read[4];
        for (int v = 0; v < 4; v++) read[v] = load(weights + v * LANES);
        for (int r = 0; r < tall; r++) {
            floats one = every(x[r * m->inputs + k]);
            for (int v = 0; v < 4; v++) sums[r][v] = fused(one, read[v], sums[r][v]);
        }
    }
    for (int r = 0; r < tall; r++) finish(sums[r], m, first, row + r, y, after);
}

/* Functions of their own, so that the sums of each stay in registers. */
#define TILES(tall)                                                                                                    \
    static __attribute__((noinline)) void whole_tile_##tall(const Matrix *m, int64_t panel, const uint8_t *x,          \
                                                            const float *scales, int64_t row, float *y,                \
                                                            const After *after) {                                      \
        whole_tile(tall, m, panel, x, scales, row, y, after);                                                          \
    }                                                                                                                  \
    static __attribute__((noinline)) void float_tile_##tall(const Matrix *m, int64_t panel, const float *x,            \
                                                            int64_t row, float *y, const After *after) {               \
        float_tile(tall, m, panel, x, row, y, after);                                                                  \
    }
#define TILE(tall)                                                                                    \
    case tall:                                                                                        \
        if (m->whole) whole_tile_##tall(m, panel, whole + row * stride, scales + row, row, y, after); \
        else float_tile_##tall(m, panel, x + row * m->inputs, row, y, after);                         \
        break;

TILES(1)
TILES(2)
#if TALL > 2
TILES(3)
TILES(4)
TILES(5)
TILES(6)
#endif

static void read_panel(const Matrix *m, int64_t panel, const float *x, const uint8_t *whole, const float *scales,
                       int64_t rows, float *y, const After *after) {
    int64_t stride = fours_of(m) * 4, tiles = (rows + TALL - 1) / TALL, row = 0;
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t tall = (rows - row + tiles - tile - 1) / (tiles - tile); /* even: 7 rows are 4 and 3, not 6 and 1 */
        switch (tall) {
            TILE(1)
            TILE(2)
#if TALL > 2
            TILE(3)
            TILE(4)
            TILE(5)
            TILE(6)
#endif
        }
        row += tall;
    }
}

#define ROOM(m, rows) ((m)->whole ? (rows) * (fours_of(m) * 4 + 4) + 64 : 0) /* bytes of scratch: rounded rows, scales */
#define SMALL (1 << 18) /* bytes of weights below which a second thread would come too late */

/* y = W x + b and what follows; scratch has ROOM. */
static void multiply(const Matrix *m, const float *x, int64_t rows, float *y, const After *after, void *scratch) {
    float *scales = (float *)scratch;
    uint8_t *whole = (uint8_t *)(scales + rows);
    if (m->whole) round_rows(x, rows, m->inputs, whole, fours_of(m) * 4, scales);
    int64_t panels = panels_of(m), bytes = m->inputs * m->outputs * (m->whole ? 1 : 4);
    int64_t threads = bytes * (rows < 8 ? 1 : rows / 4) < SMALL ? 1 : after->threads;
    if (threads <= 1) {
        for (int64_t panel = 0; panel < panels; panel++) read_panel(m, panel, x, whole, scales, rows, y, after);
        return;
    }
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static)
#endif
    for (int64_t panel = 0; panel < panels; panel++) read_panel(m, panel, x, whole, scales, rows, y, after);
}
