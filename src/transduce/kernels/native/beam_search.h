/* Greedy and beam search with an encoder-decoder. Sources enter a search and leave it between two steps; a step reads one
   token of every active row. The update is that of `beam_update_reference` (kernels/beam_update.py). */

#define MOST_BEAMS 32 /* MAX_K of inference.py */

typedef struct { /* token embeddings with positions */
    const float *weight;    /* V D */
    const float *positions; /* P D; NULL: none */
    const Norm *norm;       /* NULL: none */
    double scale;
    int64_t width;
} Entry;

typedef struct {
    Entry source, target;
    const Block *encoder_blocks;
    int64_t encoder_layers;
    const Norm *encoder_norm;   /* NULL: none */
    const Linear *memory_layers; /* one for each decoder block: keys and values of the memory */
    Decoder decoder;
} EncoderDecoder;

typedef struct {
    int64_t slots, beams, capacity, source_length, num_results, threads; /* B N L S */
    int64_t bos, eos, num_suppressed;
    double power; /* ranks are total / length ^ power */
    const int64_t *suppressed;
    float *const *caches, *const *memories; /* keys and values of each block: B N L H*K, and B H S K */
    float *mask_bias;                       /* B S */
    int16_t *indirection;                   /* B N L */
    int64_t *positions;                     /* B N */
    int64_t *history;                       /* B N L: tokens from the first column on */
    float *token_scores;                    /* B N L */
    float *totals;                          /* B N: -inf for an inactive row */
    int64_t *lengths, *max_lengths;         /* B */
    int64_t *finished_ids;                  /* B N L: best first */
    float *finished_scores, *finished_ranks; /* B N L, B N: rank -inf for an empty entry */
    int64_t *finished_lengths, *complete;    /* B N */
    int64_t *ended;                          /* B: slots that ended in a call */
    volatile int64_t *interrupt;             /* not 0: somebody waits, so the call ends with its present step */
} Search;

static void embed_token(const Entry *entry, int64_t token, int64_t position, float *to) {
    const float *from = entry->weight + token * entry->width;
    float scale = (float)entry->scale;
    for (int64_t i = 0; i < entry->width; i++) to[i] = from[i] * scale;
    if (entry->positions) {
        from = entry->positions + position * entry->width;
        for (int64_t i = 0; i < entry->width; i++) to[i] += from[i];
    }
    if (entry->norm) layer_norm(to, 1, entry->width, entry->norm, to);
}

/* Keys and values of the memory of one source (rows of 2 H K) in its slot. */
static void store_memory(const Search *search, const Block *block, int64_t layer, int64_t slot, const float *rows,
                         int64_t count) {
    int64_t heads = block->heads, width = block->head_width, size = heads * width;
    for (int64_t part = 0; part < 2; part++)
        for (int64_t head = 0; head < heads; head++) {
            float *to = search->memories[2 * layer + part] + (slot * heads + head) * search->source_length * width;
            for (int64_t i = 0; i < count; i++)
                memcpy(to + i * width, rows + i * 2 * size + part * size + head * width, width * sizeof(float));
        }
}

static void open_slot(const Search *search, int64_t slot, int64_t length, int64_t max_length) {
    int64_t beams = search->beams;
    for (int64_t i = 0; i < search->source_length; i++)
        search->mask_bias[slot * search->source_length + i] = i < length ? 0.0f : -INFINITY;
    for (int64_t row = slot * beams; row < (slot + 1) * beams; row++) {
        search->totals[row] = row == slot * beams ? 0.0f : -INFINITY; /* the rows are still equal: one is continued */
        search->positions[row] = 0;
        search->finished_ranks[row] = -INFINITY;
        search->finished_lengths[row] = search->complete[row] = 0;
    }
    search->lengths[slot] = 0;
    search->max_lengths[slot] = max_length;
}

/* Encodes sources (G S', padded on the right) and opens their slots. Nonzero: out of memory, and nothing has changed. */
int64_t transduce_search_enter(const EncoderDecoder *model, const Search *search, int64_t sources, int64_t columns,
                               const int64_t *tokens, const int64_t *lengths, const int64_t *slots,
                               const int64_t *max_lengths) {
    int64_t width = model->source.width, most_outputs = model->memory_layers->outputs, rows = sources * columns;
    const Linear *first = model->memory_layers;
    float *x = malloc((rows * (width + 1) + columns * most_outputs) * sizeof(float) + SCRATCH_BYTES(first, columns) + 64);
    if (!x) return 1;
    float *mask_bias = x + rows * width, *projected = mask_bias + rows;
    void *scratch = projected + columns * most_outputs;
    for (int64_t one = 0; one < sources; one++)
        for (int64_t i = 0; i < columns; i++) {
            int64_t row = one * columns + i;
            mask_bias[row] = i < lengths[one] ? 0.0f : -INFINITY;
            if (i < lengths[one]) embed_token(&model->source, tokens[row], i, x + row * width);
        }
    EncoderInput given = {sources, columns, mask_bias, search->threads};
    for (int64_t layer = 0; layer < model->encoder_layers; layer++)
        if (transduce_encoder_block(model->encoder_blocks + layer, &given, x)) {
            free(x);
            return 1;
        }
    Epilogue epilogue = {0, NULL, search->threads};
    for (int64_t one = 0; one < sources; one++) {
        float *memory = x + one * columns * width;
        if (model->encoder_norm) layer_norm(memory, lengths[one], width, model->encoder_norm, memory);
        for (int64_t layer = 0; layer < model->decoder.layers; layer++) {
            linear(model->memory_layers + layer, memory, lengths[one], projected, &epilogue, scratch);
            store_memory(search, model->decoder.blocks + layer, layer, slots[one], projected, lengths[one]);
        }
        open_slot(search, slots[one], lengths[one], max_lengths[one]);
    }
    free(x);
    return 0;
}

typedef struct { /* the best continuations of one source, best first */
    float totals[MOST_BEAMS], log_probs[MOST_BEAMS];
    int64_t parents[MOST_BEAMS], tokens[MOST_BEAMS], count;
} Selected;

/* The N best of the best tokens of each row; of equal totals the earlier one wins. */
static void select_best(const Search *search, const Step *step, const TopKRequest *found, int64_t first, int64_t next,
                        Selected *to) {
    to->count = 0;
    for (int64_t one = first; one < next; one++) {
        int64_t row = step->row_ids[one];
        for (int64_t i = 0; i < found->count; i++) {
            float log_prob = found->log_probs[one * found->count + i], total = search->totals[row] + log_prob;
            if (!(total > -INFINITY)) break; /* the others are not better */
            if (to->count == search->beams && !(total > to->totals[to->count - 1])) break;
            int64_t at = to->count < search->beams ? to->count++ : to->count - 1;
            for (; at > 0 && total > to->totals[at - 1]; at--) {
                to->totals[at] = to->totals[at - 1], to->log_probs[at] = to->log_probs[at - 1];
                to->parents[at] = to->parents[at - 1], to->tokens[at] = to->tokens[at - 1];
            }
            to->totals[at] = total, to->log_probs[at] = log_prob;
            to->parents[at] = row % search->beams, to->tokens[at] = found->tokens[one * found->count + i];
        }
    }
}

/* Rows of `bytes` each in a new order; `scratch` has room for all. */
static void reorder_rows(char *rows, int64_t stride, int64_t bytes, const Selected *selected, char *scratch) {
    for (int64_t n = 0; n < selected->count; n++)
        memcpy(scratch + n * bytes, rows + selected->parents[n] * stride, bytes);
    for (int64_t n = 0; n < selected->count; n++) memcpy(rows + n * stride, scratch + n * bytes, bytes);
}

static void append_selected(const Search *search, int64_t slot, const Selected *selected, char *scratch) {
    int64_t beams = search->beams, capacity = search->capacity, length = search->lengths[slot], row = slot * beams, moved = 0;
    for (int64_t n = 0; n < selected->count; n++) moved |= selected->parents[n] != n;
    if (moved) {
        reorder_rows((char *)(search->history + row * capacity), capacity * 8, length * 8, selected, scratch);
        reorder_rows((char *)(search->token_scores + row * capacity), capacity * 4, length * 4, selected, scratch);
        reorder_rows((char *)(search->indirection + row * capacity), capacity * 2, (length + 1) * 2, selected, scratch);
    }
    for (int64_t n = 0; n < beams; n++) {
        int64_t real = n < selected->count;
        search->totals[row + n] = real ? selected->totals[n] : -INFINITY;
        search->positions[row + n] = length + 1;
        if (!real) continue;
        search->history[(row + n) * capacity + length] = selected->tokens[n];
        search->token_scores[(row + n) * capacity + length] = selected->log_probs[n];
    }
    search->lengths[slot] = length + 1;
}

/* A row among the N best finished hypotheses of its source: complete ones first, then by rank. */
static void insert_finished(const Search *search, int64_t slot, int64_t row, float rank, int64_t complete) {
    int64_t beams = search->beams, capacity = search->capacity, first = slot * beams, last = first + beams - 1, at = last;
    int64_t length = search->lengths[slot];
#define BETTER(other) (complete > search->complete[other] || (complete == search->complete[other] && rank > search->finished_ranks[other]))
    if (!BETTER(last)) return;
    for (; at > first && BETTER(at - 1); at--) {
        search->finished_ranks[at] = search->finished_ranks[at - 1], search->complete[at] = search->complete[at - 1];
        int64_t size = search->finished_lengths[at] = search->finished_lengths[at - 1];
        memcpy(search->finished_ids + at * capacity, search->finished_ids + (at - 1) * capacity, size * 8);
        memcpy(search->finished_scores + at * capacity, search->finished_scores + (at - 1) * capacity, size * 4);
    }
#undef BETTER
    search->finished_ranks[at] = rank, search->complete[at] = complete, search->finished_lengths[at] = length;
    memcpy(search->finished_ids + at * capacity, search->history + row * capacity, length * 8);
    memcpy(search->finished_scores + at * capacity, search->token_scores + row * capacity, length * 4);
}

/* Moves finished rows out of the beam and drops hopeless ones; whether a row is left. */
static int64_t prune(const Search *search, int64_t slot) {
    int64_t beams = search->beams, first = slot * beams, length = search->lengths[slot], left = 0;
    int64_t full = length >= search->max_lengths[slot];
    float *totals = search->totals, present = powf((float)length, (float)search->power);
    for (int64_t row = first; row < first + beams; row++) {
        if (totals[row] == -INFINITY) continue;
        int64_t ended = search->history[row * search->capacity + length - 1] == search->eos;
        if (!ended && !full) continue;
        insert_finished(search, slot, row, totals[row] / present, ended);
        totals[row] = -INFINITY;
    }
    int64_t worst = first + search->num_results - 1;
    float longest = powf((float)search->max_lengths[slot], (float)search->power);
    for (int64_t row = first; row < first + beams; row++) {
        if (search->complete[worst] && totals[row] / longest <= search->finished_ranks[worst]) totals[row] = -INFINITY;
        left |= totals[row] > -INFINITY;
    }
    return left;
}

typedef struct { /* memory of a call */
    int64_t *row_ids, *tokens;
    float *x, *log_probs;
    char *rows; /* N rows of the history */
} SearchScratch;

/* The rows of the next step with their embeddings. */
static int64_t gather_rows(const EncoderDecoder *model, const Search *search, const SearchScratch *scratch) {
    int64_t rows = 0, capacity = search->capacity;
    for (int64_t row = 0; row < search->slots * search->beams; row++) {
        if (search->totals[row] == -INFINITY) continue;
        int64_t position = search->positions[row];
        int64_t token = position ? search->history[row * capacity + position - 1] : search->bos;
        embed_token(&model->target, token, position, scratch->x + rows * model->target.width);
        search->indirection[row * capacity + position] = (int16_t)(row % search->beams);
        scratch->row_ids[rows++] = row;
    }
    return rows;
}

/* One step of `rows` rows. Returns the number of slots that ended; -1: out of memory. */
static int64_t search_step(const EncoderDecoder *model, const Search *search, int64_t rows, const SearchScratch *scratch) {
    int64_t ended = 0;
    Step step = {rows, search->beams, search->capacity, -1, scratch->row_ids, search->positions, search->indirection, NULL,
                 NULL, search->source_length, NULL, NULL, search->mask_bias, search->threads};
    TopKRequest found = {search->beams, search->num_suppressed, search->suppressed, scratch->log_probs, scratch->tokens, NULL};
    if (transduce_decoder_step(&model->decoder, &step, search->caches, (const float *const *)search->memories, scratch->x,
                               &found))
        return -1;
    for (int64_t first = 0, next; first < rows; first = next) {
        int64_t slot = scratch->row_ids[first] / search->beams;
        for (next = first + 1; next < rows && scratch->row_ids[next] / search->beams == slot;) next++;
        Selected selected;
        select_best(search, &step, &found, first, next, &selected);
        append_selected(search, slot, &selected, scratch->rows);
        if (!prune(search, slot)) search->ended[ended++] = slot;
    }
    return ended;
}

/* Steps until a source ends, somebody waits, or `steps` are done. Returns the number of slots that ended; -1: out of
   memory. No row stands at the end of the caches: there are `steps` free positions. */
int64_t transduce_search_advance(const EncoderDecoder *model, const Search *search, int64_t steps) {
    int64_t most_rows = search->slots * search->beams, beams = search->beams, ended = 0;
    int64_t bytes = most_rows * (8 + beams * 8 + model->target.width * 4 + beams * 4) + beams * search->capacity * 8 + 256;
    SearchScratch scratch;
    scratch.row_ids = malloc(bytes);
    if (!scratch.row_ids) return -1;
    scratch.tokens = scratch.row_ids + most_rows;
    scratch.x = (float *)(scratch.tokens + most_rows * beams);
    scratch.log_probs = scratch.x + most_rows * model->target.width;
    scratch.rows = (char *)(scratch.log_probs + most_rows * beams);
    for (int64_t step = 0; step < steps && !ended; step++) {
        int64_t rows = gather_rows(model, search, &scratch);
        if (!rows) break;
        ended = search_step(model, search, rows, &scratch);
        if (*search->interrupt) break;
    }
    free(scratch.row_ids);
    return ended;
}
