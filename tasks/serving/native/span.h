/* Some rows of queries, and the tokens that they look at: a span of them at a time.
 *
 * Keys are transposed as they come, a token a column, so that a word of a query is multiplied with
 * that of WIDTH tokens. Meanwhile memory is asked for what comes next.
 */
#ifndef SPAN_H
#define SPAN_H

#include <math.h>

#include "words.h"

#define DIM 256 /* numbers of a head at most, a multiple of 32; as in attention.py */
#define SPAN 64 /* tokens whose probabilities are computed at once */
#define ROWS 48 /* that are worked on at once: the heights below divide it */
#define WIDE (2 * WIDTH)
#define HEIGHT (BYTES == 64 ? 8 : 6) /* rows that registers have room for */

/* Rows of (token, head), and what is known of them. */
typedef struct {
    size_t count;
    size_t dim; /* of a head */
    int32_t query[ROWS][DIM] __attribute__((aligned(BYTES))); /* words of the keys' kind */
    words keys[DIM][2];            /* of WIDE tokens, widened where pairs are not multiplied */
    vec probs[ROWS][SPAN / WIDTH]; /* scores at first */
    vec out[ROWS][DIM / WIDTH];    /* of bf16, words' lower numbers, then the upper ones */
    float most[ROWS];              /* the largest score so far */
    float sum[ROWS];               /* of the probabilities, before they are divided by it */
    float shrunk[ROWS];            /* what sums so far are multiplied with, as `most` grows */
    int32_t seen[ROWS];            /* tokens of this span that the row may look at */
} piece;

/* Some tokens that follow each other in a block. */
typedef struct {
    const char *keys, *end; /* their values lie `apart` bytes behind */
    size_t apart;
} stretch;

/* Have memory read some more of it, while something else is computed. */
INLINE void fetch(stretch *s)
{
    if (s->keys < s->end) {
        __builtin_prefetch(s->keys);
        __builtin_prefetch(s->keys + s->apart);
        s->keys += 64;
    }
}

/* Keys of WIDE tokens into columns. */
INLINE void transpose_keys(piece *p, const char *keys, int bf16)
{
    size_t bytes = p->dim * size_of(bf16);
    for (size_t at = 0; at < bytes; at += BYTES)
        for (int half = 0; half < 2; half++) {
            words some[WIDTH];
            UNROLLED for (int i = 0; i < WIDTH; i++)
                some[i] = get(keys + (half * WIDTH + i) * bytes + at);
            transpose(some);
            UNROLLED for (int i = 0; i < WIDTH; i++)
                if (bf16 && !PAIRS) {
                    p->keys[at / 2 + 2 * i][half] = some[i] << 16;
                    p->keys[at / 2 + 2 * i + 1][half] = some[i] & UPPER;
                } else
                    p->keys[at / 4 + i][half] = some[i];
        }
}

/* Products of `height` rows with the keys of WIDE tokens. */
INLINE void score(piece *p, size_t row, size_t place, size_t count, stretch *after, int height,
                  int pairs)
{
    vec sums[HEIGHT][2] = {{{0}}};
    stretch s = *after;
    for (size_t k = 0; k < count; k++) {
        fetch(&s);
        UNROLLED for (int r = 0; r < height; r++) {
            words one = p->query[row + r][k] - (words){0};
            sums[r][0] = multiplied(sums[r][0], one, p->keys[k][0], pairs);
            sums[r][1] = multiplied(sums[r][1], one, p->keys[k][1], pairs);
        }
    }
    *after = s;
    UNROLLED for (int r = 0; r < height; r++) {
        p->probs[row + r][place] = sums[r][0];
        p->probs[row + r][place + 1] = sums[r][1];
    }
}

/* The values of `count` tokens, by their probabilities, added to `height` rows: two vectors. */
INLINE void add_values(piece *p, size_t row, size_t place, const char *values, size_t count,
                       stretch *after, int height, int bf16)
{
    size_t stride = p->dim * size_of(bf16);
    vec sums[HEIGHT][2];
    stretch s = *after;
    UNROLLED for (int r = 0; r < height; r++)
        UNROLLED for (int half = 0; half < 2; half++)
            sums[r][half] = p->out[row + r][place + half] * p->shrunk[row + r];
    for (size_t t = 0; t < count; t++) {
        fetch(&s);
        words some = get(values + t * stride);
        vec low = bf16 ? (vec)(some << 16) : (vec)some;
        vec high = bf16 ? (vec)(some & UPPER) : (vec)get(values + t * stride + BYTES);
        UNROLLED for (int r = 0; r < height; r++) {
            vec one = all(((float *)p->probs[row + r])[t]);
            sums[r][0] += one * low;
            sums[r][1] += one * high;
        }
    }
    *after = s;
    UNROLLED for (int r = 0; r < height; r++)
        UNROLLED for (int half = 0; half < 2; half++)
            p->out[row + r][place + half] = sums[r][half];
}

/* A row's scores become probabilities, before they are divided by their sum. */
INLINE void softmax(piece *p, size_t row, size_t vectors, float scale)
{
    words lane;
    for (int j = 0; j < WIDTH; j++)
        lane[j] = j;
    vec most = all(p->most[row]), sum = {0};
    for (size_t i = 0; i < vectors; i++) {
        vec one = p->probs[row][i] * scale;
        one = either(lane + (int32_t)(i * WIDTH) < p->seen[row], one, all(-INFINITY));
        most = either(one > most, one, most);
        p->probs[row][i] = one;
    }
    float now = largest(most);
    for (size_t i = 0; i < vectors; i++) {
        p->probs[row][i] = exponential(p->probs[row][i] - now);
        sum += p->probs[row][i];
    }
    p->shrunk[row] = exponential(all(p->most[row] - now))[0];
    p->sum[row] = p->sum[row] * p->shrunk[row] + total(sum);
    p->most[row] = now;
}

/* A function of a height that is known, for as many of `left` rows as it takes. */
#define OF_HEIGHT(left, call) \
    switch (left) { \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break; \
    case 4: call(4); break; \
    case 5: call(least(5, HEIGHT)); break; \
    case 6: call(least(6, HEIGHT)); break; \
    case 7: call(least(7, HEIGHT)); break; \
    default: call(HEIGHT); \
    }

/* The rows look at SPAN tokens at most. */
INLINE void look_at(piece *p, const stretch *here, float scale, stretch *after, int bf16)
{
    size_t bytes = p->dim * size_of(bf16), deep = bf16 && PAIRS ? p->dim / 2 : p->dim;
    size_t count = (here->end - here->keys) / bytes;
    size_t vectors = (count + WIDE - 1) / WIDE * 2;
    for (size_t i = 0; i < vectors; i += 2) {
        transpose_keys(p, here->keys + i * WIDTH * bytes, bf16);
        for (size_t row = 0; row < p->count; row += HEIGHT) {
#define SCORE(height) score(p, row, i, deep, after, height, bf16 && PAIRS)
            OF_HEIGHT(p->count - row, SCORE)
        }
    }
    for (size_t row = 0; row < p->count; row++)
        softmax(p, row, vectors, scale);
    for (size_t place = 0; place < p->dim / WIDTH; place += 2) {
        const char *values = here->keys + here->apart + place * WIDTH * size_of(bf16);
        for (size_t row = 0; row < p->count; row += HEIGHT) {
#define ADD(height) add_values(p, row, place, values, count, after, height, bf16)
            OF_HEIGHT(p->count - row, ADD)
        }
    }
    while (after->keys < after->end)
        fetch(after);
}

/* A row begins: it has looked at nothing. */
INLINE void begin_row(piece *p, size_t row, const char *query, int bf16)
{
    if (bf16 && !PAIRS)
        for (size_t k = 0; k < p->dim; k += WIDTH)
            store(load(query + k * 2, 1), (char *)(p->query[row] + k), 0);
    else
        memcpy(p->query[row], query, p->dim * size_of(bf16));
    memset(p->out[row], 0, p->dim * 4);
    p->most[row] = -INFINITY;
    p->sum[row] = 0;
}

/* It ends: its values, divided by the sum of their probabilities. */
INLINE void end_row(const piece *p, size_t row, char *out, int bf16)
{
    for (size_t i = 0; i < p->dim / WIDTH; i += 2) {
        vec low = p->out[row][i] / p->sum[row], high = p->out[row][i + 1] / p->sum[row];
        char *to = out + i * WIDTH * size_of(bf16);
        if (bf16) {
            words upper = (words)in_format(high, 1), lower = (words)in_format(low, 1);
            store((vec)(upper | (lower >> 16 & 0xffff)), to, 0);
        } else {
            store(low, to, 0);
            store(high, to + BYTES, 0);
        }
    }
}

#endif
