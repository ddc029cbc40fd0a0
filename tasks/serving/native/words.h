/* Vectors of words of 32 bits, each of one number of fp32, or of two of bf16 that follow each other
 * (pairs).
 *
 * A CPU without products of such pairs widens them: the first of a word is its lower half.
 */
#ifndef WORDS_H
#define WORDS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#define BYTES 64
#else
#define BYTES 32
#endif
#define WIDTH (BYTES / 4)
#ifdef __AVX512BF16__
#define PAIRS 1
#else
#define PAIRS 0
#endif
#define UPPER ((int32_t)0xffff0000)
#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(BYTES)));
typedef int32_t words __attribute__((vector_size(BYTES)));
typedef uint16_t halves __attribute__((vector_size(BYTES / 2)));

INLINE size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

INLINE size_t size_of(int bf16)
{
    return bf16 ? 2 : 4;
}

INLINE words get(const char *from)
{
    words found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE vec widened(halves narrow)
{
#ifdef __AVX512F__
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)narrow), 16);
#else
    return (vec)(__builtin_convertvector(narrow, words) << 16);
#endif
}

/* To nearest, ties to even; every NaN becomes the quiet one. */
INLINE halves narrowed(vec wide)
{
    words b = (words)wide, nan = (b & 0x7fffffff) > 0x7f800000;
    words near = ((b + 0x7fff + ((b >> 16) & 1)) >> 16) & 0xffff;
    near = (near & ~nan) | (nan & 0x7fc0);
#ifdef __AVX512F__
    return (halves)_mm512_cvtepi32_epi16((__m512i)near);
#else
    return __builtin_convertvector(near, halves);
#endif
}

INLINE vec in_format(vec wide, int bf16)
{
    return bf16 ? widened(narrowed(wide)) : wide;
}

INLINE vec load(const char *from, int bf16)
{
    halves narrow;
    if (!bf16)
        return (vec)get(from);
    memcpy(&narrow, from, sizeof narrow);
    return widened(narrow);
}

INLINE void store(vec wide, char *to, int bf16)
{
    halves narrow = narrowed(wide);
    if (bf16)
        memcpy(to, &narrow, sizeof narrow);
    else
        memcpy(to, &wide, sizeof wide);
}

/* `sum` and the products of the numbers in x and a, which lie in the same word. */
INLINE vec multiplied(vec sum, words x, words a, int bf16)
{
    if (!bf16)
        return sum + (vec)x * (vec)a;
#ifdef __AVX512BF16__
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)a);
#else
    sum += (vec)(x << 16) * (vec)(a << 16);
    return sum + (vec)(x & UPPER) * (vec)(a & UPPER);
#endif
}

INLINE vec all(float one)
{
    return one - (vec){0};
}

INLINE vec either(words which, vec one, vec other)
{
    return (vec)((which & (words)one) | (~which & (words)other));
}

/* e to the power of x <= 0, to 2 units in the last place; 0 below -87. Polynomial of Cephes. */
INLINE vec exponential(vec x)
{
    const float shift = 0x1.8p23f;
    words nothing = x < -87; /* not NaN */
    vec near = either(nothing, all(0), x), scaled = near * 1.44269504f + shift;
    vec whole = scaled - shift, r = near - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1;
    return (vec)(((words)p + ((words)scaled << 23)) & ~nothing);
}

INLINE float largest(vec some)
{
    float found = some[0];
    for (int i = 1; i < WIDTH; i++)
        found = some[i] > found ? some[i] : found;
    return found;
}

INLINE float total(vec some)
{
    float found = 0;
    for (int i = 0; i < WIDTH; i++)
        found += some[i];
    return found;
}

/* WIDTH vectors as a matrix, whose rows become columns. */
INLINE void transpose(words *all)
{
    words low, high, other[WIDTH];
    for (int j = 0; j < WIDTH; j++) {
        low[j] = j / 2 + j % 2 * WIDTH;
        high[j] = low[j] + WIDTH / 2;
    }
    /* Every step puts the second half's vectors between those of the first one. */
    UNROLLED for (int step = 1; step < WIDTH; step *= 2) {
        UNROLLED for (int i = 0; i < WIDTH / 2; i++) {
            words a = all[i], b = all[i + WIDTH / 2];
            other[2 * i] = __builtin_shuffle(a, b, low);
            other[2 * i + 1] = __builtin_shuffle(a, b, high);
        }
        UNROLLED for (int i = 0; i < WIDTH; i++)
            all[i] = other[i];
    }
}

#endif
