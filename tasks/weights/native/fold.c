/* LoRA into bf16: `out = bf16(float(w) + scale * (b @ a))` without a temporary of the product.
 *
 * Every sum runs over the rank from first to last in one chain of fused multiply-adds, as MKL and
 * OpenBLAS sum for ranks within one of their blocks; product, scale and sum are rounded to fp32 in
 * peft's order, the result once to bf16 (to nearest, ties to even; every NaN becomes the quiet one).
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

typedef struct {
    int64_t changed, nonfinite;
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

/* Scale, add and round one group of a row. `largest` gets the magnitudes, doubled. */
INLINE int finish(vec even, vec odd, vec scale, const uint16_t *w, uint16_t *out, words *largest)
{
    words old = GET(w);
    words low = BITS(SUM(FLOATS(LEFT(old, 16)), MUL(even, scale)));
    words high = BITS(SUM(FLOATS(AND(old, WORD(-65536))), MUL(odd, scale)));
    *largest = MAX(*largest, MAX(LEFT(low, 1), LEFT(high, 1)));
    words both = UPPER(RIGHT(raised(low), 16), raised(high));
    PUT(out, both);
    return DIFFERING(both, old);
}

/* Rows [row, row + ROWS) and the group at `column` of a tile.
 *
 * Returns whether all results are finite; if not they are not right, and are to be made by `exact`.
 */
INLINE int part(const tile *t, int row, int column, int valid, int64_t *changed)
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
    int64_t sum = 0;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        const uint16_t *w = t->w[row + r] + column;
        int n = finish(sums[r][0], sums[r][1], scale, w, t->out[row + r] + column, &largest);
        sum += row + r < valid ? n : 0;
    }
    /* From 2 * 0x7f7f8000 on a number rounds to infinity, is infinite, or is none. */
    if (ANY_ABOVE(largest, WORD((int)0xfefeffff)))
        return 0;
    *changed += sum;
    return 1;
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
            uint32_t bits = (uint32_t)t->w[r][at] << 16;
            float base, product = sums[j] * t->scale;
            memcpy(&base, &bits, 4);
            uint16_t value = rounded(base + product);
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
            if (!part(t, row, column, valid, &found->changed))
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
 * whole of `a`, (rank, columns), in bf16 or fp32.
 *
 * `found` gets the number of elements that changed and of those that are not finite.
 * Returns whether it was done: not for a rank above RANKS.
 */
int fold_bf16(const uint16_t *w, uint16_t *out, const float *b, const void *a, int a_is_bf16,
              size_t rows, size_t columns, size_t rank, float scale, counts *found)
{
    float panel[RANKS * PANEL] __attribute__((aligned(64)));
    size_t item = a_is_bf16 ? 2 : 4, tiles = (rows + TILE - 1) / TILE;
    counts sum = {0, 0};
    if (rank > RANKS)
        return 0;
    for (size_t first = 0; first < columns; first += PANEL) {
        size_t width = columns - first < PANEL ? columns - first : PANEL;
        widen(a, a_is_bf16, rank, columns, first, width, panel);
        for (size_t i = 0; i < tiles; i++) {
            size_t top = i * TILE;
            int valid = rows - top < TILE ? (int)(rows - top) : TILE;
            tile t = {.panel = panel, .rank = rank, .scale = scale};
            for (int r = 0; r < TILE; r++) {
                size_t row = top + (r < valid ? r : valid - 1), at = row * columns + first;
                t.b[r] = b + row * rank, t.w[r] = w + at, t.out[r] = out + at;
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
int fold_bf16(const uint16_t *w, uint16_t *out, const float *b, const void *a, int a_is_bf16,
              size_t rows, size_t columns, size_t rank, float scale, int64_t *found)
{
    (void)w, (void)out, (void)b, (void)a, (void)a_is_bf16, (void)rows, (void)columns, (void)rank;
    (void)scale, (void)found;
    return 0;
}
#endif
