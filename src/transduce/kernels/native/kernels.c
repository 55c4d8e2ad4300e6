/* What Python calls: packing, products, and one step through a block. Everything else is in the headers. */

#ifdef __linux__
#define _GNU_SOURCE
#include <sys/mman.h>
#endif

#include "vectors.h"
#include "products.h"
#include "blocks.h"
#include "choices.h"
#include "lists.h"
#include "training.h"
#include "heads.h"
#include "readings.h"

int64_t transduce_level(void) { return LEVEL; }
int64_t transduce_panel(void) { return PANEL; }

/* Weights of more than a few pages lie in large ones, where the system has them: each small page costs a look-up. */
void transduce_advise(void *start, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    uintptr_t from = ((uintptr_t)start + 4095) & ~(uintptr_t)4095, to = ((uintptr_t)start + bytes) & ~(uintptr_t)4095;
    if (to > from) madvise((void *)from, to - from, MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
}

/* O I -> panels; outputs beyond the last are 0. */
void transduce_pack_floats(const float *from, int64_t outputs, int64_t inputs, float *to) {
    for (int64_t first = 0; first < outputs; first += PANEL)
        for (int64_t k = 0; k < inputs; k++)
            for (int64_t o = first; o < first + PANEL; o++) *to++ = o < outputs ? from[o * inputs + k] : 0.0f;
}

void transduce_pack_wholes(const int8_t *from, int64_t outputs, int64_t inputs, int8_t *to, int32_t *sums) {
    for (int64_t first = 0; first < outputs; first += PANEL) {
        for (int64_t k = 0; k < inputs; k += 4)
            for (int64_t o = first; o < first + PANEL; o++)
                for (int64_t i = k; i < k + 4; i++) *to++ = o < outputs && i < inputs ? from[o * inputs + i] : 0;
        for (int64_t o = first; o < first + PANEL; o++) {
            int32_t sum = 0;
            for (int64_t i = 0; o < outputs && i < inputs; i++) sum += from[o * inputs + i];
            sums[o] = -SHIFT * sum;
        }
    }
}

/* Nonzero: no memory. */
int64_t transduce_product(const Matrix *m, const float *x, int64_t rows, float *y, int64_t rectified, int64_t threads) {
    After after = {rectified, NULL, threads};
    void *scratch = malloc(ROOM(m, rows) + 64);
    if (!scratch) return 1;
    multiply(m, x, rows, y, &after, scratch);
    free(scratch);
    return 0;
}

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* y = x + f(x), normalised where the block does so: `last` is the matrix that f ends with, and reads `from`. */
static void leave(const Block *block, int part, const Matrix *last, const float *from, int64_t rows, float *x,
                  int64_t threads, const Scratch *scratch) {
    After after = {0, x, threads};
    multiply(last, from, rows, block->before ? x : scratch->normed, &after, scratch->rounded);
    if (!block->before) normalise(scratch->normed, rows, last->outputs, &block->norms[part], x);
}

static const float *enter(const Block *block, int part, const float *x, int64_t rows, const Scratch *scratch) {
    if (!block->before) return x;
    normalise(x, rows, block->every.inputs, &block->norms[part], scratch->normed);
    return scratch->normed;
}

static void think(const Block *block, int64_t rows, float *x, int64_t threads, const Scratch *scratch) {
    After after = {block->activation == RELU, NULL, threads};
    int64_t count = rows * block->grow.outputs;
    const float *read = enter(block, 2, x, rows, scratch);
    multiply(&block->grow, read, rows, scratch->wide, &after, scratch->rounded);
    if (block->activation != RELU) activate(scratch->wide, count, block->activation);
    if (block->gate.weights) {
        after.rectified = 0;
        multiply(&block->gate, read, rows, scratch->gated, &after, scratch->rounded);
        for (int64_t i = 0; i < count; i++) scratch->wide[i] *= scratch->gated[i];
    }
    leave(block, 2, &block->shrink, scratch->wide, rows, x, threads, scratch);
}

#define ABREAST 192 /* rows of a step that go through a block together: what is between its matrices stays in the cache */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Room for the rows of a step through any block of these sizes; NULL: no memory. Freed by its offsets. */
static int64_t *spread(const Block *block, const Step *step, Scratch *to) {
    int64_t rows = least(step->rows, ABREAST), width = block->every.inputs, hidden = block->grow.outputs;
    int64_t size = block->heads * block->head, reads = most(most(width, hidden), size);
    int64_t wide = most(3 * size, hidden), count = most(step->room, step->columns) + LANES;
    int64_t numbers = rows * (width + wide + (block->gate.weights ? hidden : 0) + size) + count + 64;
    to->offsets = malloc(numbers * 4 + count * 8 + rows * (reads + 8) + 256);
    if (!to->offsets) return NULL;
    to->normed = (float *)(to->offsets + count);
    to->wide = to->normed + rows * width;
    to->context = to->wide + rows * wide;
    to->scores = to->context + rows * size;
    to->gated = to->scores + count;
    to->rounded = (char *)to->offsets + count * 8 + numbers * 4;
    return to->offsets;
}

static void pass(const Block *block, const Step *step, float *x, const Scratch *scratch) {
    After after = {0, NULL, step->threads};
    int64_t width = block->every.inputs;
    for (int64_t first = 0, rows; first < step->rows; first += rows, x += rows * width) {
        rows = least(step->rows - first, ABREAST);
        multiply(&block->every, enter(block, 0, x, rows, scratch), rows, scratch->wide, &after, scratch->rounded);
        attend_back(block, step, first, rows, scratch);
        leave(block, 0, &block->result, scratch->context, rows, x, step->threads, scratch);
        if (block->asks.weights) {
            multiply(&block->asks, enter(block, 1, x, rows, scratch), rows, scratch->wide, &after, scratch->rounded);
            attend_up(block, step, first, rows, scratch);
            leave(block, 1, &block->answers, scratch->context, rows, x, step->threads, scratch);
        }
        think(block, rows, x, step->threads, scratch);
    }
}

/* x: R D, written over. Nonzero: no memory. */
int64_t transduce_step(const Block *block, const Step *step, float *x) {
    Scratch scratch;
    if (!spread(block, step, &scratch)) return 1;
    pass(block, step, x, &scratch);
    free(scratch.offsets);
    return 0;
}

typedef struct {
    const Block *blocks; /* all of the same sizes */
    int64_t layers;
    const Norm *last; /* of what the last block gives; NULL: none */
    const Matrix *output;
} Stack;

/* One step of a search from rows (R D, written over) to the best next tokens of each; `rooms` and `memories` are keys and
   values of each block, by turns. Nonzero: no memory. */
int64_t transduce_propose(const Stack *stack, const Step *given, float *const *rooms, const float *const *memories,
                          float *x, const Wanted *wanted) {
    Step step = *given;
    Scratch scratch;
    if (!spread(stack->blocks, &step, &scratch)) return 1;
    for (int64_t layer = 0; layer < stack->layers; layer++) {
        step.keys = rooms[2 * layer], step.values = rooms[2 * layer + 1];
        if (memories) step.memory_keys = memories[2 * layer], step.memory_values = memories[2 * layer + 1];
        pass(stack->blocks + layer, &step, x, &scratch);
    }
    free(scratch.offsets);
    if (stack->last) normalise(x, step.rows, stack->blocks->every.inputs, stack->last, x);
    return find(stack->output, x, step.rows, wanted, &step, step.threads);
}

#include "sources.h" /* last: it reads what is above */
