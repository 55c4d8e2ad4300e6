/* Entry points called from Python: weight packing, linear layers, one decoding step, one encoder block, beam search. */

#ifdef __linux__
#define _GNU_SOURCE
#include <sys/mman.h>
#endif

#include "simd.h"
#include "linear.h"
#include "block_step.h"
#include "top_k.h"
#include "shortlists.h"
#include "elements.h"
#include "cross_entropy.h"
#include "dropout.h"
#include "attention.h"
#include "additive_attention.h"

int64_t transduce_simd_level(void) { return SIMD_LEVEL; }
int64_t transduce_panel(void) { return PANEL; }

/* Huge pages for large weights, where the system has them: fewer TLB misses. */
void transduce_advise_huge_pages(void *start, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    uintptr_t from = ((uintptr_t)start + 4095) & ~(uintptr_t)4095, to = ((uintptr_t)start + bytes) & ~(uintptr_t)4095;
    if (to > from) madvise((void *)from, to - from, MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
}

/* O I to panels (see linear.h); missing outputs are 0. */
void transduce_pack_fp32(const float *from, int64_t outputs, int64_t inputs, float *to) {
    for (int64_t first = 0; first < outputs; first += PANEL)
        for (int64_t k = 0; k < inputs; k++)
            for (int64_t o = first; o < first + PANEL; o++) *to++ = o < outputs ? from[o * inputs + k] : 0.0f;
}

void transduce_pack_int8(const int8_t *from, int64_t outputs, int64_t inputs, int8_t *to, int32_t *sums) {
    for (int64_t first = 0; first < outputs; first += PANEL) {
        for (int64_t k = 0; k < inputs; k += 4)
            for (int64_t o = first; o < first + PANEL; o++)
                for (int64_t i = k; i < k + 4; i++) *to++ = o < outputs && i < inputs ? from[o * inputs + i] : 0;
        for (int64_t o = first; o < first + PANEL; o++) {
            int32_t sum = 0;
            for (int64_t i = 0; o < outputs && i < inputs; i++) sum += from[o * inputs + i];
            sums[o] = -ZERO_POINT * sum;
        }
    }
}

/* Nonzero: out of memory. */
int64_t transduce_linear(const Linear *m, const float *x, int64_t rows, float *y, int64_t relu, int64_t threads) {
    Epilogue epilogue = {relu, NULL, threads};
    void *scratch = malloc(SCRATCH_BYTES(m, rows) + 64);
    if (!scratch) return 1;
    linear(m, x, rows, y, &epilogue, scratch);
    free(scratch);
    return 0;
}

/* x + f(x), with the norm of a post-norm block: `last` is the last linear layer of f, and reads `from`. */
static void add_residual(const Block *block, int part, const Linear *last, const float *from, int64_t rows, float *x,
                  int64_t threads, const Scratch *scratch) {
    Epilogue epilogue = {0, x, threads};
    linear(last, from, rows, block->pre_norm ? x : scratch->normed, &epilogue, scratch->quantised);
    if (!block->pre_norm) layer_norm(scratch->normed, rows, last->outputs, &block->norms[part], x);
}

static const float *sublayer_input(const Block *block, int part, const float *x, int64_t rows, const Scratch *scratch) {
    if (!block->pre_norm) return x;
    layer_norm(x, rows, block->qkv.inputs, &block->norms[part], scratch->normed);
    return scratch->normed;
}

static void feed_forward(const Block *block, int64_t rows, float *x, int64_t threads, const Scratch *scratch) {
    Epilogue epilogue = {block->activation == RELU, NULL, threads};
    int64_t count = rows * block->up.outputs;
    const float *read = sublayer_input(block, 2, x, rows, scratch);
    linear(&block->up, read, rows, scratch->hidden, &epilogue, scratch->quantised);
    if (block->activation != RELU) apply_activation(scratch->hidden, count, block->activation);
    if (block->gate.weights) {
        epilogue.relu = 0;
        linear(&block->gate, read, rows, scratch->gated, &epilogue, scratch->quantised);
        for (int64_t i = 0; i < count; i++) scratch->hidden[i] *= scratch->gated[i];
    }
    add_residual(block, 2, &block->down, scratch->hidden, rows, x, threads, scratch);
}

#define STEP_ROWS 192 /* rows of a step processed together: their activations stay in the processor cache */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Scratch memory for a step through a block of these sizes; NULL: out of memory. Free `offsets`. */
static int64_t *allocate_scratch(const Block *block, const Step *step, Scratch *to) {
    int64_t rows = least(step->rows, STEP_ROWS), width = block->qkv.inputs, hidden = block->up.outputs;
    int64_t size = block->heads * block->head_width, reads = most(most(width, hidden), size);
    int64_t wide = most(3 * size, hidden), count = most(step->capacity, step->source_length) + LANES;
    int64_t numbers = rows * (width + wide + (block->gate.weights ? hidden : 0) + size) + count + 64;
    to->offsets = malloc(numbers * 4 + count * 8 + rows * (reads + 8) + 256);
    if (!to->offsets) return NULL;
    to->normed = (float *)(to->offsets + count);
    to->hidden = to->normed + rows * width;
    to->context = to->hidden + rows * wide;
    to->scores = to->context + rows * size;
    to->gated = to->scores + count;
    to->quantised = (char *)to->offsets + count * 8 + numbers * 4;
    return to->offsets;
}

static void run_block(const Block *block, const Step *step, float *x, const Scratch *scratch) {
    Epilogue epilogue = {0, NULL, step->threads};
    int64_t width = block->qkv.inputs;
    for (int64_t first = 0, rows; first < step->rows; first += rows, x += rows * width) {
        rows = least(step->rows - first, STEP_ROWS);
        const float *read = sublayer_input(block, 0, x, rows, scratch);
        linear(&block->qkv, read, rows, scratch->hidden, &epilogue, scratch->quantised);
        self_attend(block, step, first, rows, scratch);
        add_residual(block, 0, &block->attention_out, scratch->context, rows, x, step->threads, scratch);
        if (block->cross_query.weights) {
            read = sublayer_input(block, 1, x, rows, scratch);
            linear(&block->cross_query, read, rows, scratch->hidden, &epilogue, scratch->quantised);
            cross_attend(block, step, first, rows, scratch);
            add_residual(block, 1, &block->cross_out, scratch->context, rows, x, step->threads, scratch);
        }
        feed_forward(block, rows, x, step->threads, scratch);
    }
}

/* One block; x: R D, in place. Nonzero: out of memory. */
int64_t transduce_block_step(const Block *block, const Step *step, float *x) {
    Scratch scratch;
    if (!allocate_scratch(block, step, &scratch)) return 1;
    run_block(block, step, x, &scratch);
    free(scratch.offsets);
    return 0;
}

typedef struct {
    const Block *blocks; /* all of one size */
    int64_t layers;
    const Norm *final_norm; /* NULL: none */
    const Linear *output;
} Decoder;

/* One decoding step from embeddings (R D, in place) to the top k next tokens of each row; `caches` and `memories` hold
   keys and values of each block in turn. Nonzero: out of memory. */
int64_t transduce_decoder_step(const Decoder *decoder, const Step *given, float *const *caches,
                               const float *const *memories, float *x, const TopKRequest *request) {
    Step step = *given;
    Scratch scratch;
    if (!allocate_scratch(decoder->blocks, &step, &scratch)) return 1;
    for (int64_t layer = 0; layer < decoder->layers; layer++) {
        step.keys = caches[2 * layer], step.values = caches[2 * layer + 1];
        if (memories) step.memory_keys = memories[2 * layer], step.memory_values = memories[2 * layer + 1];
        run_block(decoder->blocks + layer, &step, x, &scratch);
    }
    free(scratch.offsets);
    if (decoder->final_norm) layer_norm(x, step.rows, decoder->blocks->qkv.inputs, decoder->final_norm, x);
    return top_k_linear(decoder->output, x, step.rows, request, &step, step.threads);
}

#include "encoder_block.h" /* after the definitions it uses */
#include "beam_search.h"
