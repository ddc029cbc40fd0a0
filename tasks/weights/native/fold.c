/* LoRA into bf16: `out = bf16(float(w) + scale * (b @ a))` without a temporary of the product.
 *
 * Every sum runs over the rank from first to last in one chain of fused multiply-adds, as MKL and
 * OpenBLAS sum for ranks within one of their blocks; product, scale and sum are rounded to fp32 in
 * peft's order, the result once to bf16: without bias by `rounding.py` if the rows have keys, else
 * to nearest, ties to even (every NaN becomes the quiet one).
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint16_t rounded(float wide)
{
    uint32_t b;
    memcpy(&b, &wide, 4);
    uint32_t near = (b + 0x7fff + (b >> 16 & 1)) >> 16;
    return (uint16_t)((b & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : near);
}

/* bf16 of every number, to nearest, ties to even. */
void round_bf16(const float *wide, uint16_t *out, size_t count)
{
    for (size_t i = 0; i < count; i++)
        out[i] = rounded(wide[i]);
}

/* fp32 of every bf16, exactly. */
void widen_bf16(const uint16_t *narrow, float *out, size_t count)
{
    uint32_t *bits = (uint32_t *)out;
    for (size_t i = 0; i < count; i++)
        bits[i] = (uint32_t)narrow[i] << 16;
}

#if defined(__AVX512BW__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>

#define PANEL 32 /* columns that are worked on together: a line of the cache in bf16 */
#define TILE 8   /* rows of a tile: 8 x 32 sums fit the registers of AVX-512 */
#define RANKS 384 /* up to which MKL sums the rank in one chain; as in binding.py */
#define INLINE static inline __attribute__((always_inline))

/* Numbers of elements; and for the update D, the base W, the output Q and W + D rounded to nearest
 * N: <D, D>, <Q - W, D> and <N - W, D>. */
typedef struct {
    int64_t changed, nonfinite;
    double update, kept, nearest;
} counts;

/* A panel of `a` in fp32, (rank, PANEL), and one tile: rows by pointer, so that a tile at an edge
 * can work on copies. */
typedef struct {
    const float *panel;
    size_t rank;
    float scale;
    const float *b[TILE];
    const uint16_t *w[TILE];
    uint16_t *out[TILE];
    const uint64_t *keys[TILE]; /* of each row; NULL to round to nearest */
    uint32_t pair;              /* half the number of the panel's first column */
} tile;

/* Columns come in groups of two vectors: the even ones, then the odd ones. So a vector of 16-bit
 * words is two of fp32 with a shift and a mask, and two of fp32 are one of 16-bit words likewise. */
#ifdef __AVX512BW__
typedef __m512 vec;
typedef __m512i words;
#define WIDTH 16
#define ROWS TILE
#define ZERO _mm512_setzero_ps
#define LOAD _mm512_loadu_ps
#define SPREAD _mm512_set1_ps
#define WORD _mm512_set1_epi32
#define FMA _mm512_fmadd_ps
#define MUL _mm512_mul_ps
#define SUM _mm512_add_ps
#define ADD _mm512_add_epi32
#define AND _mm512_and_si512
#define LEFT _mm512_slli_epi32
#define RIGHT _mm512_srli_epi32
#define MAX _mm512_max_epu32
#define XOR _mm512_xor_si512
#define TIMES _mm512_mullo_epi32
#define SUB _mm512_sub_ps
#define COUNT() _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#define TOTAL(x) _mm512_reduce_add_ps(x)
/* `yes` where the magnitude of x is below y, else `no`. */
#define IF_BELOW(x, y, yes, no) \
    _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(_mm512_abs_ps(x), y, _CMP_LT_OQ), no, yes)
#define FLOATS _mm512_castsi512_ps
#define BITS _mm512_castps_si512
#define GET(at) _mm512_loadu_si512((const void *)(at))
#define PUT(at, value) _mm512_storeu_si512((void *)(at), value)
#define UPPER(low, high) _mm512_mask_blend_epi16(0xaaaaaaaa, low, high)
#define DIFFERING(x, y) __builtin_popcount(_mm512_cmpneq_epi16_mask(x, y))
#define ANY_ABOVE(x, y) _mm512_cmpgt_epu32_mask(x, y)
#else
typedef __m256 vec;
typedef __m256i words;
#define WIDTH 8
#define ROWS 4
#define ZERO _mm256_setzero_ps
#define LOAD _mm256_loadu_ps
#define SPREAD _mm256_set1_ps
#define WORD _mm256_set1_epi32
#define FMA _mm256_fmadd_ps
#define MUL _mm256_mul_ps
#define SUM _mm256_add_ps
#define ADD _mm256_add_epi32
#define AND _mm256_and_si256
#define LEFT _mm256_slli_epi32
#define RIGHT _mm256_srli_epi32
#define MAX _mm256_max_epu32
#define XOR _mm256_xor_si256
#define TIMES _mm256_mullo_epi32
#define SUB _mm256_sub_ps
#define COUNT() _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)
#define TOTAL(x) total256(x)
#define IF_BELOW(x, y, yes, no) \
    _mm256_castps_si256(_mm256_blendv_ps(FLOATS(no), FLOATS(yes), \
        _mm256_cmp_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x), y, _CMP_LT_OQ)))
#define FLOATS _mm256_castsi256_ps
#define BITS _mm256_castps_si256
#define GET(at) _mm256_loadu_si256((const __m256i *)(at))
#define PUT(at, value) _mm256_storeu_si256((__m256i *)(at), value)
#define UPPER(low, high) _mm256_blend_epi16(low, high, 0xaa)
#define DIFFERING(x, y) \
    (2 * WIDTH - __builtin_popcount(_mm256_movemask_epi8(_mm256_cmpeq_epi16(x, y))) / 2)
#define ANY_ABOVE(x, y) \
    (~_mm256_movemask_epi8(_mm256_cmpeq_epi32(_mm256_max_epu32(x, y), y)))
#endif
#define GROUP (2 * WIDTH)

#ifndef __AVX512BW__
INLINE float total256(__m256 x)
{
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
#endif

/* Columns [first, first + width) of `a`, (rank, columns) in bf16 or fp32, as a panel; zeros after. */
static void widen(const void *a, int is_bf16, size_t rank, size_t columns, size_t first,
                  size_t width, float *panel)
{
    uint16_t narrow[PANEL] = {0};
    float wide[PANEL] = {0};
    for (size_t k = 0; k < rank; k++, panel += PANEL) {
        size_t at = k * columns + first;
        if (is_bf16) {
            const uint16_t *from = (const uint16_t *)a + at;
            if (width < PANEL)
                from = memcpy(narrow, from, 2 * width);
            for (int group = 0; group < PANEL; group += GROUP) {
                words both = GET(from + group);
                PUT(panel + group, LEFT(both, 16));
                PUT(panel + group + WIDTH, AND(both, WORD(-65536)));
            }
        } else {
            const float *from = (const float *)a + at;
            if (width < PANEL)
                from = memcpy(wide, from, 4 * width);
            for (int group = 0; group < PANEL; group += GROUP)
                for (int j = 0; j < WIDTH; j++) {
                    panel[group + j] = from[group + 2 * j];
                    panel[group + WIDTH + j] = from[group + 2 * j + 1];
                }
        }
    }
}

/* Bits whose upper half is the number rounded, unless it is a NaN. */
INLINE words raised(words bits)
{
    return ADD(ADD(bits, WORD(0x7fff)), AND(RIGHT(bits, 16), WORD(1)));
}

/* Random words of pairs of columns: the low half is of the even one, the high half of the odd. */
INLINE words random_words(uint64_t key, uint32_t pair)
{
    words x = ADD(ADD(COUNT(), WORD((int)pair)), WORD((int)(uint32_t)key));
    x = TIMES(XOR(x, RIGHT(x, 16)), WORD(0x21f0aaad));
    x = XOR(XOR(x, RIGHT(x, 15)), WORD((int)(key >> 32)));
    x = TIMES(x, WORD((int)0xd35a2d97));
    return XOR(x, RIGHT(x, 15));
}

/* Sums of a part, by lane. */
typedef struct {
    vec update, kept, nearest;
} lanes;

/* Bits of a sum rounded, as the upper half of each word: without bias where it is close to `base`. */
INLINE words round_sum(vec sum, vec base, words random, int unbiased, lanes *into)
{
    vec change = SUB(sum, base);
    words near = AND(raised(BITS(sum)), WORD(-65536)), out = near;
    if (unbiased) {
        vec power = FLOATS(MAX(AND(BITS(base), WORD(0x7f800000)), WORD(0x00800000)));
        words bits = AND(ADD(BITS(sum), random), WORD(-65536));
        out = IF_BELOW(change, MUL(power, SPREAD(0x1p-6f)), bits, near);
    }
    into->update = FMA(change, change, into->update);
    into->kept = FMA(SUB(FLOATS(out), base), change, into->kept);
    into->nearest = FMA(SUB(FLOATS(near), base), change, into->nearest);
    return out;
}

/* Scale, add and round one group of a row. `largest` gets the magnitudes, doubled. */
INLINE int finish(vec even, vec odd, vec scale, const uint16_t *w, uint16_t *out, words *largest,
                  words random, int unbiased, lanes *into)
{
    words old = GET(w);
    vec base[2] = {FLOATS(LEFT(old, 16)), FLOATS(AND(old, WORD(-65536)))};
    vec low = SUM(base[0], MUL(even, scale)), high = SUM(base[1], MUL(odd, scale));
    *largest = MAX(*largest, MAX(LEFT(BITS(low), 1), LEFT(BITS(high), 1)));
    words first = round_sum(low, base[0], AND(random, WORD(0xffff)), unbiased, into);
    words second = round_sum(high, base[1], RIGHT(random, 16), unbiased, into);
    words both = UPPER(RIGHT(first, 16), second);
    PUT(out, both);
    return DIFFERING(both, old);
}

/* Rows [row, row + ROWS) and the group at `column` of a tile.
 *
 * Returns whether all results are finite; if not they are not right, and are to be made by `exact`.
 */
INLINE int part(const tile *t, int row, int column, int valid, counts *found)
{
    vec sums[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        sums[r][0] = sums[r][1] = ZERO();
    const float *panel = t->panel + column;
    for (size_t k = 0; k < t->rank; k++, panel += PANEL) {
        vec left = LOAD(panel), right = LOAD(panel + WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            vec b = SPREAD(t->b[row + r][k]);
            sums[r][0] = FMA(b, left, sums[r][0]);
            sums[r][1] = FMA(b, right, sums[r][1]);
        }
    }
    vec scale = SPREAD(t->scale);
    words largest = WORD(0);
    lanes total = {ZERO(), ZERO(), ZERO()};
    int64_t sum = 0;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        const uint16_t *w = t->w[row + r] + column;
        lanes unused = total, *into = row + r < valid ? &total : &unused;
        const uint64_t *key = t->keys[row + r];
        words random = key ? random_words(*key, t->pair + column / 2) : WORD(0);
        int n = finish(sums[r][0], sums[r][1], scale, w, t->out[row + r] + column, &largest, random,
                       key != NULL, into);
        sum += row + r < valid ? n : 0;
    }
    /* From 2 * 0x7f7f0000 on a number may round to infinity, is infinite, or is none. */
    if (ANY_ABOVE(largest, WORD((int)0xfefdffff)))
        return 0;
    found->changed += sum;
    found->update += TOTAL(total.update);
    found->kept += TOTAL(total.kept);
    found->nearest += TOTAL(total.nearest);
    return 1;
}

static float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint32_t random_word(uint64_t key, uint32_t pair)
{
    uint32_t x = pair + (uint32_t)key;
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15 ^ (uint32_t)(key >> 32)) * 0xd35a2d97u;
    return x ^ x >> 15;
}

/* `sum` without bias where it is close to `base`, as 16 bits. */
static uint16_t unbiased(float sum, float base, uint32_t random)
{
    uint32_t bits, power;
    memcpy(&bits, &sum, 4);
    memcpy(&power, &base, 4);
    power &= 0x7f800000;
    float two_steps = as_float(power < 0x00800000 ? 0x00800000 : power) * 0x1p-6f;
    uint32_t up = bits + random;
    int usable = (bits & 0x7fffffff) < 0x7f800000 && (up & 0x7f800000) != 0x7f800000;
    return usable && fabsf(sum - base) < two_steps ? (uint16_t)(up >> 16) : rounded(sum);
}

/* The same in plain C, for infinities and NaN too. */
static void exact(const tile *t, int row, int column, int valid, counts *found)
{
    for (int r = row; r < row + ROWS && r < valid; r++) {
        float sums[GROUP] = {0};
        for (size_t k = 0; k < t->rank; k++)
            for (int j = 0; j < GROUP; j++)
                sums[j] = fmaf(t->b[r][k], t->panel[k * PANEL + column + j], sums[j]);
        for (int j = 0; j < GROUP; j++) {
            int at = column + (j < WIDTH ? 2 * j : 2 * (j - WIDTH) + 1);
            float base = as_float((uint32_t)t->w[r][at] << 16), product = sums[j] * t->scale;
            float sum = base + product;
            uint16_t near = rounded(sum), value = near;
            if (t->keys[r]) {
                uint32_t random = random_word(*t->keys[r], t->pair + at / 2);
                value = unbiased(sum, base, at % 2 ? random >> 16 : random & 0xffff);
            }
            double change = sum - base;
            found->update += change * change;
            found->kept += (as_float((uint32_t)value << 16) - base) * change;
            found->nearest += (as_float((uint32_t)near << 16) - base) * change;
            t->out[r][at] = value;
            found->changed += value != t->w[r][at];
            found->nonfinite += (value & 0x7f80) == 0x7f80;
        }
    }
}

/* Fetch what the same tile of the next panel touches, and its share of the rows of `a` there.
 *
 * The lines lie on as many pages as there are rows, which no prefetcher of the CPU follows.
 */
INLINE void fetch_ahead(const tile *t, const char *a, size_t stride, size_t from, size_t to)
{
    for (int r = 0; r < TILE; r++) {
        __builtin_prefetch(t->w[r] + PANEL);
        __builtin_prefetch(t->out[r] + PANEL, 1);
    }
    for (size_t k = from; k < to; k++)
        __builtin_prefetch(a + k * stride);
}

static void whole_tile(const tile *t, int valid, counts *found)
{
    for (int row = 0; row < TILE; row += ROWS)
        for (int column = 0; column < PANEL; column += GROUP)
            if (!part(t, row, column, valid, found))
                exact(t, row, column, valid, found);
}

/* A tile at an edge: by way of copies, of which the last row fills up what is missing. */
static void edge_tile(tile *t, int valid, size_t width, counts *found)
{
    uint16_t before[TILE][PANEL] = {{0}}, after[TILE][PANEL], *out[TILE];
    for (int r = 0; r < TILE; r++) {
        memcpy(before[r], t->w[r], 2 * width);
        out[r] = t->out[r];
        t->w[r] = before[r], t->out[r] = after[r];
    }
    whole_tile(t, valid, found);
    for (int r = 0; r < valid; r++)
        memcpy(out[r], after[r], 2 * width);
}

/* A block of `rows` rows: `w` and `out` (rows, columns) in bf16, `b` (rows, rank) in fp32, and the
 * whole of `a`, (rank, columns), in bf16 or fp32. `keys` (rows) are for unbiased rounding, or NULL.
 *
 * `found` gets the counts and sums of the block.
 * Returns whether it was done: not for a rank above RANKS.
 */
int fold_bf16(const uint16_t *w, uint16_t *out, const float *b, const void *a, const uint64_t *keys,
              int a_is_bf16, size_t rows, size_t columns, size_t rank, float scale, counts *found)
{
    float panel[RANKS * PANEL] __attribute__((aligned(64)));
    size_t item = a_is_bf16 ? 2 : 4, tiles = (rows + TILE - 1) / TILE;
    counts sum = {0};
    if (rank > RANKS)
        return 0;
    for (size_t first = 0; first < columns; first += PANEL) {
        size_t width = columns - first < PANEL ? columns - first : PANEL;
        widen(a, a_is_bf16, rank, columns, first, width, panel);
        for (size_t i = 0; i < tiles; i++) {
            size_t top = i * TILE;
            int valid = rows - top < TILE ? (int)(rows - top) : TILE;
            tile t = {.panel = panel, .rank = rank, .scale = scale, .pair = first / 2};
            for (int r = 0; r < TILE; r++) {
                size_t row = top + (r < valid ? r : valid - 1), at = row * columns + first;
                t.b[r] = b + row * rank, t.w[r] = w + at, t.out[r] = out + at;
                t.keys[r] = keys ? keys + row : NULL;
            }
            if (first + PANEL < columns)
                fetch_ahead(&t, (const char *)a + (first + PANEL) * item, columns * item,
                            i * rank / tiles, (i + 1) * rank / tiles);
            if (valid == TILE && width == PANEL)
                whole_tile(&t, TILE, &sum);
            else
                edge_tile(&t, valid, width, &sum);
        }
    }
    *found = sum;
    return 1;
}
#else
/* Not for this CPU: returns 0, and nothing is done. */
int fold_bf16(const uint16_t *w, uint16_t *out, const float *b, const void *a, const uint64_t *keys,
              int a_is_bf16, size_t rows, size_t columns, size_t rank, float scale, void *found)
{
    (void)w, (void)out, (void)b, (void)a, (void)keys, (void)a_is_bf16, (void)rows, (void)columns;
    (void)rank, (void)scale, (void)found;
    return 0;
}
#endif
