/* Attention of a batch's new tokens to all tokens before them, whose keys and values are kept:
 *
 *     out[token, head] = softmax(scale * query[token, head] . keys) @ values
 *
 * Heads that share keys and values are worked on at once, so that these are read once: reading them
 * is what a step of a rollout waits for. They lie as they come, a token's after another's, and keys
 * are turned where they are used, a few at a time. For each (block, head) the cache has keys
 * (tokens, dim), then values (tokens, dim).
 *
 * Sums and probabilities are fp32. The softmax goes along the tokens, SPAN of them at a time (Dao
 * et al. 2022, arXiv 2205.14135, algorithm 1). A row's result depends neither on rows beside it nor
 * on threads, nor on whether the tokens before it were new together with it.
 */
#include <math.h>

#include "words.h"

#define DIM 256 /* at most, and a multiple of 32; as in attention.py */
#define SPAN 64
#define ROWS 48 /* (token, head) that are worked on at once */
#define WIDE (2 * WIDTH)
#define HEIGHT (BYTES == 64 ? 8 : 6) /* rows that are multiplied at once, by the number of registers */

typedef struct {
    char *cache;
    size_t per_block; /* bytes */
    size_t tokens;    /* of a block; a multiple of 32 */
    size_t heads;     /* of keys and values */
    size_t group;     /* heads of queries for each of them */
    size_t dim;
    float scale;
    int bf16; /* the number format of everything; fp32 otherwise */
} layer;

/* Sequences, whose new tokens follow each other. */
typedef struct {
    const int32_t *starts;  /* (count + 1): new tokens before each sequence's */
    const int32_t *lengths; /* (count): all tokens, of which the new ones are the last */
    const int32_t *blocks;  /* (count, width): of the cache, in the order of their tokens */
    const int64_t *slots;   /* of each new token: block * tokens + place; < 0: it is not kept */
    size_t count, width;
    size_t longest; /* new tokens of a sequence */
} batch;

/* What new tokens have, heads beside each other; they follow each other at `stride` bytes. */
typedef struct {
    char *at;
    size_t stride;
} rows;

/* Some rows of a sequence's head, and what is known of them. */
typedef struct {
    size_t count, first; /* rows are (token, head), counted from the first new token's */
    size_t begin;        /* tokens before the new ones */
    int32_t query[ROWS][DIM] __attribute__((aligned(BYTES))); /* words, as the keys' */
    words keys[DIM][2]; /* of WIDE tokens, a token a column; widened where pairs are not multiplied */
    vec probs[ROWS][SPAN / WIDTH];
    vec out[ROWS][DIM / WIDTH]; /* of bf16, the lower numbers of words, then the upper ones */
    float most[ROWS], sum[ROWS], shrunk[ROWS];
} piece;

INLINE char *keys_of(const layer *l, size_t block, size_t head)
{
    return l->cache + block * l->per_block + head * 2 * l->tokens * l->dim * size_of(l->bf16);
}

INLINE void write_cache(const layer *l, const batch *b, rows keys, rows values, size_t token, size_t head)
{
    size_t bytes = l->dim * size_of(l->bf16);
    int64_t slot = b->slots[token];
    if (slot < 0)
        return;
    char *to = keys_of(l, slot / l->tokens, head) + slot % l->tokens * bytes;
    memcpy(to, keys.at + token * keys.stride + head * bytes, bytes);
    memcpy(to + l->tokens * bytes, values.at + token * values.stride + head * bytes, bytes);
}

/* Keys of WIDE tokens into columns. */
INLINE void transpose_keys(const layer *l, piece *p, const char *keys, int bf16)
{
    size_t bytes = l->dim * size_of(bf16);
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

/* `height` rows add_values the values of `count` tokens by their probs; two vectors of them. */
INLINE void add_values(piece *p, size_t row, size_t place, const char *values, size_t stride,
                 size_t count, stretch *after, int height, int bf16)
{
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

/* Scores of a row, of which it may look at `seen`, become probs. */
INLINE void softmax(piece *p, size_t row, size_t vectors, size_t seen, float scale)
{
    words lane;
    for (int j = 0; j < WIDTH; j++)
        lane[j] = j;
    vec most = all(p->most[row]), sum = {0};
    for (size_t i = 0; i < vectors; i++) {
        vec one = p->probs[row][i] * scale;
        one = either(lane + (int32_t)(i * WIDTH) < (int32_t)seen, one, all(-INFINITY));
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

/* `count` tokens from `token` on, which lie in one block: SPAN at most. */
INLINE void span(const layer *l, piece *p, const char *keys, size_t token, size_t count,
                 stretch *after, int bf16)
{
    size_t bytes = l->dim * size_of(bf16), deep = bf16 && PAIRS ? l->dim / 2 : l->dim;
    size_t vectors = (count + WIDE - 1) / WIDE * 2;
    const char *values = keys + l->tokens * bytes;
    for (size_t i = 0; i < vectors; i += 2) {
        transpose_keys(l, p, keys + i * WIDTH * bytes, bf16);
        for (size_t row = 0; row < p->count; row += HEIGHT) {
#define SCORE(height) score(p, row, i, deep, after, height, bf16 && PAIRS)
            OF_HEIGHT(p->count - row, SCORE)
        }
    }
    for (size_t row = 0; row < p->count; row++) {
        size_t place = p->begin + (p->first + row) / l->group + 1; /* past the last one it sees */
        size_t seen = place > token ? least(place - token, count) : 0;
        softmax(p, row, vectors, seen, l->scale);
    }
    for (size_t place = 0; place < l->dim / WIDTH; place += 2) {
        const char *from = values + place * WIDTH * size_of(bf16);
        for (size_t row = 0; row < p->count; row += HEIGHT) {
#define ADD(height) add_values(p, row, place, from, bytes, count, after, height, bf16)
            OF_HEIGHT(p->count - row, ADD)
        }
    }
}

INLINE void load_rows(const layer *l, piece *p, const char *query, size_t stride, int bf16)
{
    size_t item = size_of(bf16);
    for (size_t row = 0; row < p->count; row++) {
        size_t token = (p->first + row) / l->group, head = (p->first + row) % l->group;
        const char *from = query + token * stride + head * l->dim * item;
        if (bf16 && !PAIRS)
            for (size_t k = 0; k < l->dim; k += WIDTH)
                store(load(from + k * 2, 1), (char *)(p->query[row] + k), 0);
        else
            memcpy(p->query[row], from, l->dim * item);
        memset(p->out[row], 0, l->dim * 4);
        p->most[row] = -INFINITY;
        p->sum[row] = 0;
    }
}

INLINE void store_rows(const layer *l, piece *p, char *out, size_t stride, int bf16)
{
    size_t item = size_of(bf16);
    for (size_t row = 0; row < p->count; row++) {
        size_t token = (p->first + row) / l->group, head = (p->first + row) % l->group;
        char *to = out + token * stride + head * l->dim * item;
        for (size_t i = 0; i < l->dim / WIDTH; i += 2) {
            vec low = p->out[row][i] / p->sum[row], high = p->out[row][i + 1] / p->sum[row];
            if (bf16) {
                words upper = (words)in_format(high, 1), lower = (words)in_format(low, 1);
                low = (vec)(upper | (lower >> 16 & 0xffff));
            }
            store(low, to + i * WIDTH * item, 0);
            if (!bf16)
                store(high, to + (i + 1) * WIDTH * item, 0);
        }
    }
}

/* The rows of a head's piece. */
typedef struct {
    size_t which, head, first, count; /* count: 0 where the sequence has no such rows */
} place;

INLINE place place_of(const layer *l, const batch *b, size_t number)
{
    place found = {number / l->heads % b->count, number % l->heads,
                   number / l->heads / b->count * ROWS, 0};
    size_t rows = (b->starts[found.which + 1] - b->starts[found.which]) * l->group;
    found.count = found.first < rows ? least(rows - found.first, ROWS) : 0;
    return found;
}

INLINE size_t new_tokens(const batch *b, size_t which)
{
    return b->starts[which + 1] - b->starts[which];
}

/* The stretch from `token` on of tokens that the place's last row looks at. */
INLINE stretch stretch_at(const layer *l, const batch *b, const place *at, size_t token)
{
    size_t bytes = l->dim * size_of(l->bf16), in_block = token % l->tokens;
    size_t before = b->lengths[at->which] - new_tokens(b, at->which);
    size_t seen = before + (at->first + at->count - 1) / l->group + 1;
    if (!at->count || token >= seen)
        return (stretch){0};
    const char *keys = keys_of(l, b->blocks[at->which * b->width + token / l->tokens], at->head);
    size_t count = least(least(SPAN, l->tokens - in_block), seen - token);
    keys += in_block * bytes;
    return (stretch){keys, keys + count * bytes, l->tokens * bytes};
}

INLINE void attend_rows(const layer *l, const batch *b, rows query, rows out, const place *now,
                 const place *next, int bf16)
{
    size_t start = b->starts[now->which], bytes = l->dim * size_of(bf16);
    size_t heads = now->head * l->group * bytes;
    piece p;
    p.count = now->count, p.first = now->first;
    p.begin = b->lengths[now->which] - new_tokens(b, now->which);
    load_rows(l, &p, query.at + start * query.stride + heads, query.stride, bf16);
    stretch here = stretch_at(l, b, now, 0);
    for (size_t token = 0; here.keys;) {
        size_t count = (here.end - here.keys) / bytes;
        stretch after = stretch_at(l, b, now, token + count), other = after;
        if (!after.keys)
            other = stretch_at(l, b, next, 0);
        span(l, &p, here.keys, token, count, &other, bf16);
        while (other.keys < other.end)
            fetch(&other);
        token += count;
        here = after;
    }
    store_rows(l, &p, out.at + start * out.stride + heads, out.stride, bf16);
}

/* Keep keys and values of the new tokens, then attend. */
void attend(const layer *l, const batch *b, rows query, rows keys, rows values, rows out)
{
    size_t pieces = (b->longest * l->group + ROWS - 1) / ROWS * b->count * l->heads, taken = 0;
#pragma omp parallel
    {
        /* All of them first: a prompt may begin as another one does, and then has its keys. */
#pragma omp for collapse(2) schedule(static)
        for (size_t token = 0; token < (size_t)b->starts[b->count]; token++)
            for (size_t head = 0; head < l->heads; head++)
                write_cache(l, b, keys, values, token, head);
        size_t number;
#pragma omp atomic capture
        number = taken++;
        while (number < pieces) {
            place now = place_of(l, b, number), next = {0};
#pragma omp atomic capture
            number = taken++;
            if (number < pieces)
                next = place_of(l, b, number);
            if (now.count && l->bf16)
                attend_rows(l, b, query, out, &now, &next, 1);
            else if (now.count)
                attend_rows(l, b, query, out, &now, &next, 0);
        }
    }
}
