/* Attention of a batch's new tokens to all tokens before them, whose keys and values are kept:
 *
 *     out[token, head] = softmax(scale * query[token, head] . keys) @ values
 *
 * Heads that share keys and values are worked on at once, so that these are read once: reading them
 * is what a step of a rollout waits for. They lie as they come, a token's after another's, and keys
 * are transposed where they are used, a few at a time. For each (block, head) the cache has keys
 * (tokens, dim), then values (tokens, dim).
 *
 * Sums and probabilities are fp32. The softmax goes along the tokens, SPAN of them at a time (Dao
 * et al. 2022, arXiv 2205.14135, algorithm 1). A row's result depends neither on rows beside it nor
 * on threads, nor on whether the tokens before it were new together with it.
 */
#include "span.h"

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

INLINE char *keys_of(const layer *l, size_t block, size_t head)
{
    return l->cache + block * l->per_block + head * 2 * l->tokens * l->dim * size_of(l->bf16);
}

INLINE void write_cache(const layer *l, const batch *b, rows keys, rows values, size_t token,
                        size_t head)
{
    size_t bytes = l->dim * size_of(l->bf16);
    int64_t slot = b->slots[token];
    if (slot < 0)
        return;
    char *to = keys_of(l, slot / l->tokens, head) + slot % l->tokens * bytes;
    memcpy(to, keys.at + token * keys.stride + head * bytes, bytes);
    memcpy(to + l->tokens * bytes, values.at + token * values.stride + head * bytes, bytes);
}

/* Rows (token, head) of a sequence for one head of keys, from its `first` row on. */
typedef struct {
    size_t which, head, first, count; /* of rows: 0 where the sequence has none left */
    size_t before;                    /* its tokens that are not new */
    size_t seen;                      /* tokens that the last row looks at */
} task;

INLINE task task_of(const layer *l, const batch *b, size_t number)
{
    task t = {.which = number / l->heads % b->count, .head = number % l->heads};
    t.first = number / l->heads / b->count * ROWS;
    size_t new = b->starts[t.which + 1] - b->starts[t.which];
    if (t.first < new * l->group) {
        t.count = least(new * l->group - t.first, ROWS);
        t.before = b->lengths[t.which] - new;
        t.seen = t.before + (t.first + t.count - 1) / l->group + 1;
    }
    return t;
}

/* A span of a task's tokens, from `token` on; none past the last one. */
INLINE stretch stretch_at(const layer *l, const batch *b, const task *t, size_t token)
{
    if (token >= t->seen)
        return (stretch){0};
    size_t bytes = l->dim * size_of(l->bf16), place = token % l->tokens;
    size_t count = least(least(SPAN, l->tokens - place), t->seen - token);
    size_t block = b->blocks[t->which * b->width + token / l->tokens];
    const char *keys = keys_of(l, block, t->head) + place * bytes;
    return (stretch){keys, keys + count * bytes, l->tokens * bytes};
}

/* What a task's row has, of all that new tokens have. */
INLINE char *row_of(const layer *l, const batch *b, const task *t, rows all, size_t row)
{
    size_t token = b->starts[t->which] + (t->first + row) / l->group;
    size_t head = t->head * l->group + (t->first + row) % l->group;
    return all.at + token * all.stride + head * l->dim * size_of(l->bf16);
}

INLINE void attend_rows(const layer *l, const batch *b, rows query, rows out, const task *now,
                        const task *next, int bf16)
{
    size_t bytes = l->dim * size_of(bf16);
    piece p;
    p.count = now->count, p.dim = l->dim;
    for (size_t row = 0; row < now->count; row++)
        begin_row(&p, row, row_of(l, b, now, query, row), bf16);
    stretch here = stretch_at(l, b, now, 0);
    for (size_t token = 0; here.keys;) {
        for (size_t row = 0; row < now->count; row++) /* some look at no more of them */
            p.seen[row] = now->before + (now->first + row) / l->group + 1 - token;
        token += (here.end - here.keys) / bytes;
        stretch after = stretch_at(l, b, now, token);
        stretch fetched = after.keys ? after : stretch_at(l, b, next, 0);
        look_at(&p, &here, l->scale, &fetched, bf16);
        here = after;
    }
    for (size_t row = 0; row < now->count; row++)
        end_row(&p, row, row_of(l, b, now, out, row), bf16);
}

/* Keep keys and values of the new tokens, then attend. */
void attend(const layer *l, const batch *b, rows query, rows keys, rows values, rows out)
{
    size_t tasks = (b->longest * l->group + ROWS - 1) / ROWS * b->count * l->heads, taken = 0;
#pragma omp parallel
    {
        /* All of them first: a prompt may begin as another one does, and then has its keys. */
#pragma omp for collapse(2) schedule(static)
        for (size_t token = 0; token < (size_t)b->starts[b->count]; token++)
            for (size_t head = 0; head < l->heads; head++)
                write_cache(l, b, keys, values, token, head);
        /* Each thread takes a task ahead: what it will read is fetched before. */
        size_t number;
#pragma omp atomic capture
        number = taken++;
        task now = number < tasks ? task_of(l, b, number) : (task){0};
        while (number < tasks) {
#pragma omp atomic capture
            number = taken++;
            task next = number < tasks ? task_of(l, b, number) : (task){0};
            if (l->bf16)
                attend_rows(l, b, query, out, &now, &next, 1);
            else
                attend_rows(l, b, query, out, &now, &next, 0);
            now = next;
        }
    }
}
