/* Linear layers, y = W x + b in fp32 or int8. Weights are packed in panels of PANEL outputs, input-major; each weight is
   read once for TILE_ROWS rows. */

#define PANEL (4 * LANES)

typedef struct {
    const void *weights;
    const float *scales; /* int8: one scale per output */
    const float *bias;
    const int32_t *sums; /* int8: -ZERO_POINT times the sum of the weights of an output */
    int64_t inputs, outputs;
    int64_t int8; /* weights are int8; else fp32 */
} Linear;

typedef struct {
    int64_t relu;     /* y = max(0, y) */
    const float *residual; /* added after the activation; NULL: none */
    int64_t threads;
} Epilogue;

INLINE int64_t panels_of(const Linear *m) { return (m->outputs + PANEL - 1) / PANEL; }
INLINE int64_t quads_of(const Linear *m) { return (m->inputs + 3) / 4; }

/* x = s q, q = round(x / s), s = max|x| / 127: one scale per row, so that rows do not depend on their batch. */
static void quantise_rows(const float *x, int64_t rows, int64_t inputs, uint8_t *to, int64_t stride, float *scales) {
    int64_t aligned = inputs / LANES * LANES;
    for (int64_t row = 0; row < rows; row++, x += inputs, to += stride) {
        floats most = broadcast(0.0f);
        for (int64_t i = 0; i < aligned; i += LANES) most = max_lanes(most, abs_lanes(load(x + i)));
        float top = reduce_max(most);
        for (int64_t i = aligned; i < inputs; i++) top = fabsf(x[i]) > top ? fabsf(x[i]) : top;
        float up = top > 0 ? 127.0f / top : 0.0f;
        scales[row] = top / 127.0f;
        for (int64_t i = 0; i < aligned; i += LANES) quantise_lanes(mul(load(x + i), broadcast(up)), to + i);
        for (int64_t i = aligned; i < inputs; i++) to[i] = (uint8_t)(int8_t)(lrintf(x[i] * up) + ZERO_POINT);
        for (int64_t i = inputs; i < stride; i++) to[i] = 0; /* padding: its weights are 0 */
    }
}

/* Bias, ReLU and residual of a finished sum. An incomplete panel goes through a small buffer. */
INLINE void write_outputs(floats made[4], const Linear *m, int64_t first, int64_t row, float *y,
                          const Epilogue *epilogue) {
    int64_t at = row * m->outputs + first;
    int full = first + PANEL <= m->outputs;
    float part[PANEL], *to = full ? y + at : part;
    for (int v = 0; v < 4; v++) {
        if (m->bias) made[v] = add(made[v], load(m->bias + first + v * LANES));
        if (epilogue->relu) made[v] = max_lanes(made[v], broadcast(0.0f));
        if (epilogue->residual && full) made[v] = add(made[v], load(epilogue->residual + at + v * LANES));
        store(to + v * LANES, made[v]);
    }
    if (!full)
        for (int64_t i = 0; i < m->outputs - first; i++)
            y[at + i] = part[i] + (epilogue->residual ? epilogue->residual[at + i] : 0);
}

INLINE void int8_tile(const int tall, const Linear *m, int64_t panel, const uint8_t *x, const float *scales,
                       int64_t row, float *y, const Epilogue *epilogue) {
    int64_t quads = quads_of(m), first = panel * PANEL;
    const int8_t *weights = (const int8_t *)m->weights + first * quads * 4;
    ints sums[TILE_ROWS][4];
    for (int r = 0; r < tall; r++)
        for (int v = 0; v < 4; v++) sums[r][v] = ZERO_POINT ? load_ints(m->sums + first + v * LANES) : zero_ints();
    for (int64_t k = 0; k < quads; k++, weights += 4 * PANEL) {
        ints read[4];
        for (int v = 0; v < 4; v++) read[v] = load_weights(weights + v * 4 * LANES);
        for (int r = 0; r < tall; r++) {
            ints four = broadcast4(x + (r * quads + k) * 4);
            for (int v = 0; v < 4; v++) sums[r][v] = dot4(sums[r][v], four, read[v]);
        }
    }
    for (int r = 0; r < tall; r++) {
        floats made[4];
        for (int v = 0; v < 4; v++)
            made[v] = mul(mul(to_floats(sums[r][v]), broadcast(scales[r])), load(m->scales + first + v * LANES));
        write_outputs(made, m, first, row + r, y, epilogue);
    }
}

INLINE void fp32_tile(const int tall, const Linear *m, int64_t panel, const float *x, int64_t row, float *y,
                       const Epilogue *epilogue) {
    int64_t first = panel * PANEL;
    const float *weights = (const float *)m->weights + first * m->inputs;
    floats sums[TILE_ROWS][4];
    for (int r = 0; r < tall; r++)
        for (int v = 0; v < 4; v++) sums[r][v] = broadcast(0.0f);
    for (int64_t k = 0; k < m->inputs; k++, weights += PANEL) {
        floats read[4];
        for (int v = 0; v < 4; v++) read[v] = load(weights + v * LANES);
        for (int r = 0; r < tall; r++) {
            floats one = broadcast(x[r * m->inputs + k]);
            for (int v = 0; v < 4; v++) sums[r][v] = fma_lanes(one, read[v], sums[r][v]);
        }
    }
    for (int r = 0; r < tall; r++) write_outputs(sums[r], m, first, row + r, y, epilogue);
}

/* One function per tile height, so that the compiler keeps its accumulators in registers. */
#define TILES(tall)                                                                                                    \
    static __attribute__((noinline)) void int8_tile_##tall(const Linear *m, int64_t panel, const uint8_t *x,          \
                                                            const float *scales, int64_t row, float *y,                \
                                                            const Epilogue *epilogue) {                                      \
        int8_tile(tall, m, panel, x, scales, row, y, epilogue);                                                          \
    }                                                                                                                  \
    static __attribute__((noinline)) void fp32_tile_##tall(const Linear *m, int64_t panel, const float *x,            \
                                                            int64_t row, float *y, const Epilogue *epilogue) {               \
        fp32_tile(tall, m, panel, x, row, y, epilogue);                                                                  \
    }
#define TILE(tall)                                                                                    \
    case tall:                                                                                        \
        if (m->int8) int8_tile_##tall(m, panel, quantised + row * stride, scales + row, row, y, epilogue); \
        else fp32_tile_##tall(m, panel, x + row * m->inputs, row, y, epilogue);                         \
        break;

TILES(1)
TILES(2)
#if TILE_ROWS > 2
TILES(3)
TILES(4)
TILES(5)
TILES(6)
#endif

static void linear_panel(const Linear *m, int64_t panel, const float *x, const uint8_t *quantised, const float *scales,
                       int64_t rows, float *y, const Epilogue *epilogue) {
    int64_t stride = quads_of(m) * 4, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, row = 0;
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t tall = (rows - row + tiles - tile - 1) / (tiles - tile); /* balanced: 7 rows are 4 and 3, not 6 and 1 */
        switch (tall) {
            TILE(1)
            TILE(2)
#if TILE_ROWS > 2
            TILE(3)
            TILE(4)
            TILE(5)
            TILE(6)
#endif
        }
        row += tall;
    }
}

#define SCRATCH_BYTES(m, rows) ((m)->int8 ? (rows) * (quads_of(m) * 4 + 4) + 64 : 0) /* quantised rows and their scales */
#define SERIAL_BYTES (1 << 18) /* bytes of weights below which a second thread does not pay */

/* y = W x + b with its epilogue; scratch has SCRATCH_BYTES. */
static void linear(const Linear *m, const float *x, int64_t rows, float *y, const Epilogue *epilogue, void *scratch) {
    float *scales = (float *)scratch;
    uint8_t *quantised = (uint8_t *)(scales + rows);
    if (m->int8) quantise_rows(x, rows, m->inputs, quantised, quads_of(m) * 4, scales);
    int64_t panels = panels_of(m), bytes = m->inputs * m->outputs * (m->int8 ? 1 : 4);
    int64_t threads = bytes * (rows < 8 ? 1 : rows / 4) < SERIAL_BYTES ? 1 : epilogue->threads;
    if (threads <= 1) {
        for (int64_t panel = 0; panel < panels; panel++) linear_panel(m, panel, x, quantised, scales, rows, y, epilogue);
        return;
    }
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static)
#endif
    for (int64_t panel = 0; panel < panels; panel++) linear_panel(m, panel, x, quantised, scales, rows, y, epilogue);
}
