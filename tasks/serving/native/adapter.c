/* What a LoRA adapter adds to the output of a layer, for rows that all use it: for each part of it
 *
 *     y[:, begin : begin + width] += (scale * (x @ a.T)) @ b.T
 *
 * A rollout's batch has some dozens of rows and an adapter's rank is small: for a library of
 * products these are many small ones, of which each costs its call. Here a layer is one call, and
 * nothing is kept between calls.
 *
 * Sums are fp32. What lies between the two products has the number format of the model, before and
 * after the scale, as in training; the sum with `y` is rounded once. A row's result does not depend
 * on the rows beside it. A part whose `b` is all zero is one that the adapter does not train.
 *
 * Where pairs of bf16 have to be widened (`words.h`), they are in the first product as they come,
 * since every number is used a few times; for the second one beforehand.
 */
#include <stdlib.h>

#include "words.h"

#ifdef __AVX512F__
#define DEEP 4 /* rows of a that are multiplied at once */
#else
#define DEEP 2
#endif
#define TALL (WIDTH / DEEP) /* rows of x that are multiplied at once */
#define HEIGHT 8            /* rows of y that are worked on at once */
#define ROWS 256            /* whose numbers between the products are kept at once */
#define PARTS 8             /* of a layer, at most; as in adapter.py */
#define RANK 512            /* at most, and a multiple of 8; likewise */

typedef struct {
    const char *a; /* (rank, wide) */
    const char *b; /* (width, rank), maybe with more rows */
    size_t begin, width;
} part;

typedef struct {
    part parts[PARTS];
    size_t count, rank, wide;
    int bf16; /* the number format of everything; fp32 otherwise */
} layer;

/* Rows of x or y, which follow each other at `stride` bytes. */
typedef struct {
    char *at;
    size_t stride, count;
} rows;

/* The sums of WIDTH vectors, in their order: halves of each are added, and two vectors make one. */
INLINE vec totals(vec *all)
{
    for (int count = WIDTH, group = WIDTH; count > 1; count /= 2, group /= 2) {
        words low, high;
        for (int j = 0; j < WIDTH; j++) {
            int lane = j / (group / 2) * group + j % (group / 2); /* of both vectors in a row */
            low[j] = lane;
            high[j] = lane + group / 2;
        }
        for (int i = 0; i < count / 2; i++) {
            vec a = all[2 * i], b = all[2 * i + 1];
            all[i] = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
        }
    }
    return all[0];
}

/* Products of TALL rows of x with DEEP rows of a, `bytes` long. */
INLINE vec dots(const char *const *x, const char *const *a, size_t bytes, int bf16)
{
    vec sums[TALL * DEEP] = {{0}};
    char last[TALL + DEEP][BYTES];
    const char *ends[TALL + DEEP];
    size_t whole = bytes - bytes % BYTES;
    for (int i = 0; i < TALL + DEEP && whole < bytes; i++) {
        memset(last[i], 0, BYTES);
        memcpy(last[i], (i < TALL ? x[i] : a[i - TALL]) + whole, bytes - whole);
        ends[i] = last[i] - whole;
    }
    for (size_t at = 0; at < bytes; at += BYTES) {
        const char *const *from = at < whole ? x : ends;
        const char *const *with = at < whole ? a : ends + TALL;
        words some[TALL];
        UNROLLED for (int r = 0; r < TALL; r++)
            some[r] = get(from[r] + at);
        UNROLLED for (int k = 0; k < DEEP; k++) {
            words other = get(with[k] + at);
            UNROLLED for (int r = 0; r < TALL; r++)
                sums[r * DEEP + k] = multiplied(sums[r * DEEP + k], some[r], other, bf16);
        }
    }
    return totals(sums);
}

/* The bytes of a number between the products. */
INLINE size_t size_between(int bf16)
{
    return size_of(bf16 && PAIRS);
}

/* TALL rows from `row`, DEEP ranks from `rank`: of x to between the products. */
INLINE void first_product(const layer *l, const part *p, rows x, size_t row, size_t rank,
                          float scale, int bf16, char *inner)
{
    const char *some[TALL], *others[DEEP];
    size_t item = size_between(bf16), bytes = l->wide * size_of(bf16);
    for (size_t r = 0; r < TALL; r++)
        some[r] = x.at + least(row + r, x.count - 1) * x.stride; /* past the last: it again */
    for (size_t k = 0; k < DEEP; k++)
        others[k] = p->a + (rank + k) * bytes;
    vec found = in_format(dots(some, others, bytes, bf16), bf16);
    if (scale != 1)
        found = in_format(scale * found, bf16);
    char made[BYTES];
    store(found, made, bf16 && PAIRS);
    for (size_t r = 0; r < TALL && row + r < x.count; r++)
        memcpy(inner + ((row + r) * l->rank + rank) * item, made + r * DEEP * item, DEEP * item);
}

/* WIDTH rows of `b`, `count` words each, as columns; zeros past the `width` that are there. Words
 * of two numbers become two columns where they are to be widened. */
INLINE void columns(const char *b, size_t width, size_t count, int widen, int32_t *panel)
{
    for (size_t j = 0; j < WIDTH; j++)
        for (size_t k = 0; k < count; k++) {
            int32_t one = 0;
            if (j < width)
                memcpy(&one, b + (j * count + k) * 4, 4);
            if (widen) {
                panel[2 * k * WIDTH + j] = (int32_t)((uint32_t)one << 16);
                panel[(2 * k + 1) * WIDTH + j] = one & UPPER;
            } else
                panel[k * WIDTH + j] = one;
        }
}

/* From between the products, `count` words a row, to `width` of WIDTH columns of y. */
INLINE void second_product(const int32_t *panel, const char *inner, size_t count, rows y,
                           size_t width, int bf16)
{
    for (size_t row = 0; row < y.count; row += HEIGHT) {
        vec sums[HEIGHT] = {{0}};
        const char *from[HEIGHT];
        for (size_t r = 0; r < HEIGHT; r++)
            from[r] = inner + least(row + r, y.count - 1) * count * 4;
        for (size_t k = 0; k < count; k++) {
            words some = get((const char *)(panel + k * WIDTH));
            UNROLLED for (int r = 0; r < HEIGHT; r++) {
                int32_t one;
                memcpy(&one, from[r] + k * 4, 4);
                sums[r] = multiplied(sums[r], some, one - (words){0}, bf16 && PAIRS);
            }
        }
        for (size_t r = 0; r < HEIGHT && row + r < y.count; r++) {
            char edge[BYTES] = {0}, *there = y.at + (row + r) * y.stride;
            char *to = width < WIDTH ? memcpy(edge, there, width * size_of(bf16)) : there;
            store(load(to, bf16) + sums[r], to, bf16);
            if (to == edge)
                memcpy(there, edge, width * size_of(bf16));
        }
    }
}

/* ROWS rows at most; `inner` has room for (rows, rank) of every part. */
INLINE void block(const layer *l, const part *const *parts, size_t count, rows x, rows y,
                  float scale, int bf16, char *inner)
{
    size_t item = size_of(bf16), per_part = x.count * l->rank * size_between(bf16);
    size_t deep = l->rank / DEEP, tiles = (x.count + TALL - 1) / TALL;
    /* A few rows of a small layer take less than waking a thread does. */
#pragma omp parallel if (per_part * l->wide * count > 100000)
    {
        int32_t panel[RANK * WIDTH] __attribute__((aligned(BYTES)));
#pragma omp for schedule(static)
        for (size_t i = 0; i < tiles * count * deep; i++) {
            size_t row = i / (count * deep) * TALL, which = i / deep % count;
            size_t rank = i % deep * DEEP;
            first_product(l, parts[which], x, row, rank, scale, bf16, inner + which * per_part);
        }
        for (size_t which = 0; which < count; which++) {
            const part *p = parts[which];
            size_t length = l->rank * item, words_between = l->rank * size_between(bf16) / 4;
#pragma omp for schedule(static) nowait
            for (size_t column = 0; column < p->width; column += WIDTH) {
                size_t width = least(p->width - column, WIDTH);
                rows to = {y.at + (p->begin + column) * item, y.stride, y.count};
                columns(p->b + column * length, width, length / 4, bf16 && !PAIRS, panel);
                second_product(panel, inner + which * per_part, words_between, to, width, bf16);
            }
        }
    }
}

static int trained(const part *p, size_t rank, int bf16)
{
    size_t bytes = p->width * rank * size_of(bf16); /* a multiple of 16 */
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t some;
        memcpy(&some, p->b + i, 8);
        if (some)
            return 1;
    }
    return 0;
}

/* Add it to y (count, .), made of x (count, wide); strides are bytes.
 *
 * Returns whether it was done: not without memory.
 */
int add_adapter(const layer *l, char *x, size_t x_stride, char *y, size_t y_stride, size_t count,
                float scale)
{
    const part *parts[PARTS];
    size_t found = 0;
    for (size_t i = 0; i < l->count; i++)
        if (trained(&l->parts[i], l->rank, l->bf16))
            parts[found++] = &l->parts[i];
    if (!found || !count)
        return 1;
    char *inner = malloc(least(count, ROWS) * found * l->rank * size_between(l->bf16));
    if (!inner)
        return 0;
    for (size_t row = 0; row < count; row += ROWS) {
        rows from = {x + row * x_stride, x_stride, least(count - row, ROWS)};
        rows to = {y + row * y_stride, y_stride, from.count};
        if (l->bf16)
            block(l, parts, found, from, to, scale, 1, inner);
        else
            block(l, parts, found, from, to, scale, 0, inner);
    }
    free(inner);
    return 1;
}
