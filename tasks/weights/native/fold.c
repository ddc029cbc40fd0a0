/* LoRA into bf16: `out = bf16(float(w) + scale * (b @ a))` without a temporary of the product.
 *
 * Every sum runs over the rank from first to last in one chain of fused multiply-adds, as MKL and
 * OpenBLAS sum for ranks within one of their blocks; product, scale and sum are rounded to fp32 in
 * peft's order, the result once to bf16 (to nearest, ties to even; every NaN becomes the quiet one).
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PANEL 32 /* columns of `a` that lie together */
#define TILE 8   /* rows of a tile: 8 x 32 sums fit the registers of AVX-512 */

/* Rearrange `a`, (rank, columns) in fp32 or bf16, into panels (rank, PANEL), zeros at the end. */
void fold_pack(const void *a, int is_bf16, size_t rank, size_t columns, float *panels)
{
    for (size_t first = 0; first < columns; first += PANEL)
        for (size_t k = 0; k < rank; k++) {
            size_t width = columns - first < PANEL ? columns - first : PANEL;
            uint32_t *to = (uint32_t *)panels + first * rank + k * PANEL;
            if (is_bf16) {
                const uint16_t *from = (const uint16_t *)a + k * columns + first;
                for (size_t j = 0; j < width; j++)
                    to[j] = (uint32_t)from[j] << 16;
            } else
                memcpy(to, (const float *)a + k * columns + first, 4 * width);
            memset(to + width, 0, 4 * (PANEL - width));
        }
}

/* bf16 of every number, to nearest, ties to even. */
void round_bf16(const float *wide, uint16_t *out, size_t count)
{
    const uint32_t *bits = (const uint32_t *)wide;
    for (size_t i = 0; i < count; i++) {
        uint32_t b = bits[i];
        uint32_t rounded = (b + 0x7fff + (b >> 16 & 1)) >> 16;
        out[i] = (uint16_t)((b & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>

typedef struct {
    int64_t changed, nonfinite;
} counts;

/* One tile: rows by pointer, so that a tile at an edge can work on copies. */
typedef struct {
    const float *b[TILE];
    const uint16_t *w[TILE];
    uint16_t *out[TILE];
} tile;

#ifdef __AVX512F__
typedef __m512 vec;
typedef __m512i words;
#define WIDTH 16
#define ROWS TILE
#define ZERO _mm512_setzero_ps
#define LOAD _mm512_loadu_ps
#define SPREAD _mm512_set1_ps
#define FMA _mm512_fmadd_ps

static inline void finish(vec sum, vec scale, const uint16_t *w, uint16_t *out, counts *found)
{
    __m256i old = _mm256_loadu_si256((const __m256i *)w);
    words base = _mm512_slli_epi32(_mm512_cvtepu16_epi32(old), 16);
    vec wide = _mm512_add_ps(_mm512_castsi512_ps(base), _mm512_mul_ps(sum, scale));
    words bits = _mm512_castps_si512(wide);
    words odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    words raised = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    words rounded = _mm512_srli_epi32(raised, 16);
    __mmask16 nan = _mm512_cmp_ps_mask(wide, wide, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
    words was = _mm512_srli_epi32(base, 16), exponent = _mm512_set1_epi32(0x7f80);
    found->changed += __builtin_popcount(_mm512_cmpneq_epi32_mask(rounded, was));
    words high = _mm512_and_si512(rounded, exponent);
    found->nonfinite += __builtin_popcount(_mm512_cmpeq_epi32_mask(high, exponent));
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16(rounded));
}
#else
typedef __m256 vec;
typedef __m256i words;
#define WIDTH 8
#define ROWS 4
#define ZERO _mm256_setzero_ps
#define LOAD _mm256_loadu_ps
#define SPREAD _mm256_set1_ps
#define FMA _mm256_fmadd_ps

static inline int marked(words mask)
{
    return __builtin_popcount(_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
}

static inline void finish(vec sum, vec scale, const uint16_t *w, uint16_t *out, counts *found)
{
    words base = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)w));
    vec start = _mm256_castsi256_ps(_mm256_slli_epi32(base, 16));
    vec wide = _mm256_add_ps(start, _mm256_mul_ps(sum, scale));
    words bits = _mm256_castps_si256(wide);
    words odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    words raised = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    words rounded = _mm256_srli_epi32(raised, 16);
    words nan = _mm256_castps_si256(_mm256_cmp_ps(wide, wide, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    words exponent = _mm256_set1_epi32(0x7f80);
    found->changed += WIDTH - marked(_mm256_cmpeq_epi32(rounded, base));
    found->nonfinite += marked(_mm256_cmpeq_epi32(_mm256_and_si256(rounded, exponent), exponent));
    words packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(packed));
}
#endif

/* ROWS rows from `row` on, and two vectors of columns from `column` on, of one tile. */
static inline void part(const tile *t, const float *panel, size_t rank, int row, int column,
                        int valid, vec scale, counts *found)
{
    vec sums[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        sums[r][0] = sums[r][1] = ZERO();
    for (size_t k = 0; k < rank; k++) {
        vec left = LOAD(panel + k * PANEL + column), right = LOAD(panel + k * PANEL + column + WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            vec b = SPREAD(t->b[row + r][k]);
            sums[r][0] = FMA(b, left, sums[r][0]);
            sums[r][1] = FMA(b, right, sums[r][1]);
        }
    }
    counts ignored;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        for (int half = 0; half < 2; half++) {
            int at = column + half * WIDTH;
            finish(sums[r][half], scale, t->w[row + r] + at, t->out[row + r] + at,
                   row + r < valid ? found : &ignored);
        }
}

/* Fetch what the same tile of the next panel touches, and its share of that panel.
 *
 * The lines of a tile lie on as many pages as it has rows, which no prefetcher of the CPU follows.
 */
static inline void fetch_ahead(const tile *t, int valid, const float *panel, size_t from, size_t to)
{
    for (int r = 0; r < valid; r++) {
        __builtin_prefetch(t->w[r] + PANEL);
        __builtin_prefetch(t->out[r] + PANEL, 1);
    }
    for (size_t i = from; i < to; i += 16)
        __builtin_prefetch(panel + i);
}

/* A block of `rows` rows: `w` and `out` (rows, columns) in bf16, `b` (rows, rank) in fp32.
 *
 * `found` gets the number of elements that changed and of those that are not finite. Returns 1.
 */
int fold_bf16(const uint16_t *w, uint16_t *out, const float *b, const float *panels, size_t rows,
              size_t columns, size_t rank, float factor, counts *found)
{
    uint16_t before[TILE][PANEL] = {{0}}, after[TILE][PANEL];
    vec scale = SPREAD(factor);
    counts sum = {0, 0};
    for (size_t first = 0; first < columns; first += PANEL) {
        size_t width = columns - first < PANEL ? columns - first : PANEL;
        for (size_t top = 0; top < rows; top += TILE) {
            int valid = rows - top < TILE ? (int)(rows - top) : TILE;
            int whole = valid == TILE && width == PANEL;
            tile t;
            for (int r = 0; r < TILE; r++) {
                size_t row = top + (r < valid ? r : valid - 1), at = row * columns + first;
                if (!whole) {
                    memset(before[r], 0, sizeof before[r]);
                    memcpy(before[r], w + at, 2 * width);
                }
                t.b[r] = b + row * rank;
                t.w[r] = whole ? w + at : before[r];
                t.out[r] = whole ? out + at : after[r];
            }
            if (whole && first + PANEL < columns) {
                size_t size = PANEL * rank, from = top * size / rows / 16 * 16;
                fetch_ahead(&t, valid, panels + (first + PANEL) * rank, from,
                            (top + TILE) * size / rows);
            }
            for (int row = 0; row < TILE; row += ROWS)
                for (int column = 0; column < PANEL; column += 2 * WIDTH)
                    part(&t, panels + first * rank, rank, row, column, valid, scale, &sum);
            for (int r = 0; !whole && r < valid; r++)
                memcpy(out + (top + r) * columns + first, after[r], 2 * width);
        }
    }
    *found = sum;
    return 1;
}
#else
/* Not for this CPU: returns 0, and nothing is done. */
int fold_bf16(const uint16_t *w, uint16_t *out, const float *b, const float *panels, size_t rows,
              size_t columns, size_t rank, float factor, int64_t *found)
{
    (void)w, (void)out, (void)b, (void)panels, (void)rows, (void)columns, (void)rank;
    (void)factor, (void)found;
    return 0;
}
#endif
