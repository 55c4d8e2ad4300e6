/* Queries, keys and values of short rows in, contexts out, and the gradients of all three: attention in training, one
   row and head at a time, in fp32 whatever comes in. Nothing is kept between the passes: weights are made again. */

typedef struct {
    const void *query, *keys, *values, *slopes; /* each R H . K; slopes: of the contexts */
    void *contexts, *for_query, *for_keys, *for_values;
    const uint8_t *seen;                   /* R S: the keys that may be looked at; NULL: all */
    int64_t places[8][3];                  /* where row, head and step lie, in the order of the pointers above */
    int64_t seen_row;
    int64_t narrow, rows, heads, steps, slots, width, causal, threads;
    double scale;
} Heads;

/* c (M N) = a b, where numbers of a lie `down` apart from row to row and `along` within one. N: whole groups of lanes. */
INLINE void small_tile(const int tall, const int groups, const float *a, int64_t down, int64_t along, const float *b,
                       int64_t b_row, int64_t inner, float *c, int64_t c_row) {
    floats sums[TILE_ROWS][4];
    for (int r = 0; r < tall; r++)
        for (int v = 0; v < groups; v++) sums[r][v] = broadcast(0.0f);
    for (int64_t k = 0; k < inner; k++, b += b_row) {
        floats read[4];
        for (int v = 0; v < groups; v++) read[v] = load(b + v * LANES);
        for (int r = 0; r < tall; r++) {
            floats one = broadcast(a[r * down + k * along]);
            for (int v = 0; v < groups; v++) sums[r][v] = fma_lanes(one, read[v], sums[r][v]);
        }
    }
    for (int r = 0; r < tall; r++)
        for (int v = 0; v < groups; v++) store(c + r * c_row + v * LANES, sums[r][v]);
}

#define SMALL_TILE(name, tall, groups)                                                                                \
    static __attribute__((noinline)) void small_##name##_##groups(const float *a, int64_t down, int64_t along,       \
                                                                  const float *b, int64_t b_row, int64_t inner,      \
                                                                  float *c, int64_t c_row) {                         \
        small_tile(tall, groups, a, down, along, b, b_row, inner, c, c_row);                                         \
    }
SMALL_TILE(one, 1, 1)
SMALL_TILE(one, 1, 2)
SMALL_TILE(one, 1, 4)
SMALL_TILE(tall, TILE_ROWS, 1)
SMALL_TILE(tall, TILE_ROWS, 2)
SMALL_TILE(tall, TILE_ROWS, 4)

static void small_product(const float *a, int64_t down, int64_t along, const float *b, int64_t b_row, int64_t inner,
                          float *c, int64_t c_row, int64_t rows, int64_t columns) {
    for (int64_t first = 0; first < columns;) {
        int64_t left = (columns - first) / LANES, groups = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        for (int64_t row = 0; row < rows;) {
            int tall = rows - row >= TILE_ROWS;
            const float *from = a + row * down, *with = b + first;
            float *to = c + row * c_row + first;
            if (tall && groups == 4) small_tall_4(from, down, along, with, b_row, inner, to, c_row);
            else if (tall && groups == 2) small_tall_2(from, down, along, with, b_row, inner, to, c_row);
            else if (tall) small_tall_1(from, down, along, with, b_row, inner, to, c_row);
            else if (groups == 4) small_one_4(from, down, along, with, b_row, inner, to, c_row);
            else if (groups == 2) small_one_2(from, down, along, with, b_row, inner, to, c_row);
            else small_one_1(from, down, along, with, b_row, inner, to, c_row);
            row += tall ? TILE_ROWS : 1;
        }
        first += groups * LANES;
    }
}

INLINE int64_t whole_lanes(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

/* Rows of one head (`step` apart) to fp32, rows of `room` numbers, 0 beyond the last; and turned, where wanted. */
INLINE void take_kind(const void *from, int narrow, int64_t first, int64_t step, int64_t rows, int64_t width,
                      int64_t room, float *to) {
    for (int64_t row = 0; row < rows; row++, to += room) {
        for (int64_t i = 0; i < width; i++) to[i] = at(from, first + row * step + i, narrow);
        for (int64_t i = width; i < room; i++) to[i] = 0;
    }
}

static void take_head(const Heads *h, int which, const void *from, int64_t row, int64_t head, int64_t rows, float *to) {
    const int64_t *place = h->places[which];
    int64_t first = row * place[0] + head * place[1], room = whole_lanes(h->width);
    if (h->narrow) take_kind(from, 1, first, place[2], rows, h->width, room, to);
    else take_kind(from, 0, first, place[2], rows, h->width, room, to);
}

static void give_head(const Heads *h, int which, void *to, int64_t row, int64_t head, int64_t rows, const float *from) {
    const int64_t *place = h->places[which];
    int64_t first = row * place[0] + head * place[1], room = whole_lanes(h->width);
    for (int64_t r = 0; r < rows; r++, from += room, first += place[2])
        if (h->narrow) for (int64_t i = 0; i < h->width; i++) put(to, first + i, from[i], 1);
        else for (int64_t i = 0; i < h->width; i++) put(to, first + i, from[i], 0);
}

/* M N -> N M, rows of the result `room` apart and 0 beyond the last. */
static void turn_head(const float *from, int64_t rows, int64_t width, int64_t room, float *to) {
    int64_t from_room = whole_lanes(width), row = 0;
#if LEVEL > 1
    for (; row + 4 <= rows; row += 4)
        for (int64_t i = 0; i < from_room; i += 4) { /* beyond the width lie zeros, and room for as many rows */
            const float *x = from + row * from_room + i;
            float *y = to + i * room + row;
            __m128 a = _mm_loadu_ps(x), b = _mm_loadu_ps(x + from_room);
            __m128 c = _mm_loadu_ps(x + 2 * from_room), d = _mm_loadu_ps(x + 3 * from_room);
            _MM_TRANSPOSE4_PS(a, b, c, d);
            _mm_storeu_ps(y, a), _mm_storeu_ps(y + room, b), _mm_storeu_ps(y + 2 * room, c), _mm_storeu_ps(y + 3 * room, d);
        }
#endif
    for (int64_t i = 0; i < width; i++) {
        for (int64_t left = row; left < rows; left++) to[i * room + left] = from[left * from_room + i];
        for (int64_t left = rows; left < room; left++) to[i * room + left] = 0;
    }
}

/* softmax of scaled scores, 0 where nothing may be seen. `kept`: one number a key. */
static void weigh_head(const Heads *h, int64_t row, float *weights, float *kept) {
    int64_t room = whole_lanes(h->slots);
    const uint8_t *seen = h->seen ? h->seen + row * h->seen_row : NULL;
    float scale = (float)h->scale;
    for (int64_t s = 0; s < room; s++) kept[s] = s < h->slots && !h->causal && (!seen || seen[s]) ? 1.0f : 0.0f;
    for (int64_t t = 0; t < h->steps; t++, weights += room) {
        if (h->causal) kept[t] = !seen || seen[t] ? 1.0f : 0.0f;
        float most = -1e30f, sum = 0;
#pragma omp simd reduction(max : most)
        for (int64_t s = 0; s < room; s++) {
            float score = kept[s] > 0 ? weights[s] * scale : -1e30f;
            weights[s] = score, most = score > most ? score : most;
        }
#pragma omp simd reduction(+ : sum)
        for (int64_t s = 0; s < room; s++) {
            weights[s] = fast_exp(weights[s] - most) * kept[s];
            sum += weights[s];
        }
        float part = sum > 0 ? 1 / sum : sum; /* what is no number stays none */
#pragma omp simd
        for (int64_t s = 0; s < room; s++) weights[s] *= part;
    }
}

/* One row and head: the weights, T S. `turned` has room for the keys. */
static void look(const Heads *h, int64_t row, const float *query, const float *keys, float *turned, float *weights,
                 float *kept) {
    int64_t wide = whole_lanes(h->width), room = whole_lanes(h->slots);
    turn_head(keys, h->slots, h->width, room, turned);
    small_product(query, wide, 1, turned, room, h->width, weights, room, h->steps, room);
    weigh_head(h, row, weights, kept);
}

static void forth(const Heads *h, int64_t row, int64_t head, float *scratch) {
    int64_t wide = whole_lanes(h->width), room = whole_lanes(h->slots);
    float *query = scratch, *keys = query + h->steps * wide, *turned = keys + h->slots * wide;
    float *weights = turned + wide * room;
    take_head(h, 0, h->query, row, head, h->steps, query);
    take_head(h, 1, h->keys, row, head, h->slots, keys);
    look(h, row, query, keys, turned, weights, weights + h->steps * room);
    take_head(h, 2, h->values, row, head, h->slots, keys);
    small_product(weights, room, 1, keys, wide, h->slots, query, wide, h->steps, wide);
    give_head(h, 4, h->contexts, row, head, h->steps, query);
}

/* dV = P' dC, dP = dC V', dS = P (dP - sum P dP) scale, dQ = dS K, dK = dS' Q. */
static void back(const Heads *h, int64_t row, int64_t head, float *scratch) {
    int64_t steps = h->steps, slots = h->slots, wide = whole_lanes(h->width), room = whole_lanes(slots);
    float *query = scratch, *keys = query + steps * wide, *values = keys + slots * wide, *slopes = values + slots * wide;
    float *turned = slopes + steps * wide, *weights = turned + wide * room, *inner = weights + steps * room;
    take_head(h, 0, h->query, row, head, steps, query);
    take_head(h, 1, h->keys, row, head, slots, keys);
    take_head(h, 2, h->values, row, head, slots, values);
    take_head(h, 3, h->slopes, row, head, steps, slopes);
    look(h, row, query, keys, turned, weights, inner);
    turn_head(values, slots, h->width, room, turned);
    small_product(slopes, wide, 1, turned, room, h->width, inner, room, steps, room);
    small_product(weights, 1, room, slopes, wide, steps, values, wide, slots, wide); /* the values are read: dV */
    give_head(h, 7, h->for_values, row, head, slots, values);
    for (int64_t t = 0; t < steps; t++) {
        float sum = 0, scale = (float)h->scale, *p = weights + t * room, *d = inner + t * room;
#pragma omp simd reduction(+ : sum)
        for (int64_t s = 0; s < room; s++) sum += p[s] * d[s];
#pragma omp simd
        for (int64_t s = 0; s < room; s++) d[s] = p[s] * (d[s] - sum) * scale;
    }
    small_product(inner, room, 1, keys, wide, slots, slopes, wide, steps, wide);
    give_head(h, 5, h->for_query, row, head, steps, slopes);
    small_product(inner, 1, room, query, wide, steps, keys, wide, slots, wide);
    give_head(h, 6, h->for_keys, row, head, slots, keys);
}

/* Nonzero: no memory. */
static int64_t each_head(const Heads *h, int backward) {
    int64_t wide = whole_lanes(h->width), room = whole_lanes(h->slots), failed = 0;
    int64_t numbers = 2 * (h->steps + h->slots) * wide + wide * room + (2 * h->steps + 1) * room;
#pragma omp parallel if (h->threads > 1) num_threads(h->threads) reduction(+ : failed)
    {
        float *scratch = malloc(numbers * 4 + 64);
        failed += !scratch;
#pragma omp for
        for (int64_t one = 0; one < h->rows * h->heads; one++) {
            if (!scratch) continue;
            if (backward) back(h, one / h->heads, one % h->heads, scratch);
            else forth(h, one / h->heads, one % h->heads, scratch);
        }
        free(scratch);
    }
    return failed;
}

int64_t transduce_look(const Heads *h) { return each_head(h, 0); }
int64_t transduce_look_slopes(const Heads *h) { return each_head(h, 1); }
