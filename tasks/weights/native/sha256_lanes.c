/* SHA-256 of up to eight messages at a time, one in each lane of a vector.
 *
 * A single SHA-256 is a chain of dependent additions: without the CPU's SHA instructions one core
 * hashes 0.2 to 0.4 GB/s. The tensors of a checkpoint are many, so eight chains run side by side.
 * Portable vectors of GCC, compiled for the machine at hand.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 8
typedef uint32_t vec __attribute__((vector_size(32)));
typedef uint8_t bytes __attribute__((vector_size(32)));

static const uint32_t ROUND_CONSTANTS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

#define INLINE static inline __attribute__((always_inline))

INLINE vec load_big_endian(const uint8_t *at)
{
    bytes raw;
    memcpy(&raw, at, 32);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    const bytes swapped = {3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12,
                           19, 18, 17, 16, 23, 22, 21, 20, 27, 26, 25, 24, 31, 30, 29, 28};
    raw = __builtin_shuffle(raw, swapped);
#endif
    return (vec)raw;
}

/* Eight vectors of eight words: word j of vector i becomes word i of vector j. */
INLINE void transpose(const vec in[8], vec out[8])
{
    const vec low32 = {0, 8, 1, 9, 4, 12, 5, 13}, high32 = {2, 10, 3, 11, 6, 14, 7, 15};
    const vec low64 = {0, 1, 8, 9, 4, 5, 12, 13}, high64 = {2, 3, 10, 11, 6, 7, 14, 15};
    const vec low128 = {0, 1, 2, 3, 8, 9, 10, 11}, high128 = {4, 5, 6, 7, 12, 13, 14, 15};
    vec pairs[8], quads[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = __builtin_shuffle(in[i], in[i + 1], low32);
        pairs[i + 1] = __builtin_shuffle(in[i], in[i + 1], high32);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            quads[i + 2 * j] = __builtin_shuffle(pairs[i + j], pairs[i + 2 + j], low64);
            quads[i + 2 * j + 1] = __builtin_shuffle(pairs[i + j], pairs[i + 2 + j], high64);
        }
    for (int i = 0; i < 4; i++) {
        out[i] = __builtin_shuffle(quads[i], quads[i + 4], low128);
        out[i + 4] = __builtin_shuffle(quads[i], quads[i + 4], high128);
    }
}

/* The three-operand logic and the rotation are single instructions of AVX-512VL. */
#ifdef __AVX512VL__
#include <immintrin.h>
#define LOGIC(a, b, c, table) \
    (vec)_mm256_ternarylogic_epi32((__m256i)(a), (__m256i)(b), (__m256i)(c), table)
#define CHOOSE(e, f, g) LOGIC(e, f, g, 0xca)
#define MAJORITY(a, b, c) LOGIC(a, b, c, 0xe8)
#define XOR3(a, b, c) LOGIC(a, b, c, 0x96)
#define ROTATE(a, n) (vec)_mm256_ror_epi32((__m256i)(a), n)
#else
#define CHOOSE(e, f, g) ((g) ^ ((e) & ((f) ^ (g))))
#define MAJORITY(a, b, c) (((a) & (b)) | ((c) & ((a) | (b))))
#define XOR3(a, b, c) ((a) ^ (b) ^ (c))
#define ROTATE(a, n) (((a) >> (n)) | ((a) << (32 - (n))))
#endif

/* The compression of FIPS 180-4, in every lane on its own message. */
static void compress(uint32_t *const states[LANES], const uint8_t *const data[LANES], size_t blocks)
{
    vec state[8], w[16], in[8];
    for (int lane = 0; lane < LANES; lane++)
        memcpy(&in[lane], states[lane], 32);
    transpose(in, state);
    for (size_t block = 0; block < blocks; block++) {
        for (int half = 0; half < 2; half++) {
            for (int lane = 0; lane < LANES; lane++)
                in[lane] = load_big_endian(data[lane] + 64 * block + 32 * half);
            transpose(in, w + 8 * half);
        }
        vec a = state[0], b = state[1], c = state[2], d = state[3];
        vec e = state[4], f = state[5], g = state[6], h = state[7];
#pragma GCC unroll 64
        for (int round = 0; round < 64; round++) {
            vec word = w[round & 15];
            if (round >= 16) {
                vec early = w[(round + 1) & 15], late = w[(round + 14) & 15];
                vec s0 = XOR3(ROTATE(early, 7), ROTATE(early, 18), early >> 3);
                vec s1 = XOR3(ROTATE(late, 17), ROTATE(late, 19), late >> 10);
                word = w[round & 15] = word + s0 + w[(round + 9) & 15] + s1;
            }
            vec first = h + XOR3(ROTATE(e, 6), ROTATE(e, 11), ROTATE(e, 25)) + CHOOSE(e, f, g)
                        + (word + ROUND_CONSTANTS[round]);
            vec second = XOR3(ROTATE(a, 2), ROTATE(a, 13), ROTATE(a, 22)) + MAJORITY(a, b, c);
            h = g; g = f; f = e; e = d + first;
            d = c; c = b; b = a; a = first + second;
        }
        state[0] += a; state[1] += b; state[2] += c; state[3] += d;
        state[4] += e; state[5] += f; state[6] += g; state[7] += h;
    }
    transpose(state, in);
    for (int lane = 0; lane < LANES; lane++)
        memcpy(states[lane], &in[lane], 32);
}

/* Advance `count` states, eight words each, by whole blocks of 64 bytes: `blocks[i]` from `data[i]`.
 *
 * Lanes whose message ends early are filled with the messages that follow; what is left over repeats
 * a message into a state that is thrown away.
 */
void sha256_update(size_t count, uint32_t *const *states, const uint8_t *const *data,
                   const size_t *blocks)
{
    size_t owner[LANES], done[LANES], next = 0, active = 0;
    for (;;) {
        while (active < LANES && next < count) {
            if (blocks[next]) {
                owner[active] = next;
                done[active++] = 0;
            }
            next++;
        }
        if (!active)
            return;
        uint32_t spare[LANES][8] = {{0}};
        uint32_t *into[LANES];
        const uint8_t *from[LANES];
        size_t step = SIZE_MAX;
        for (size_t lane = 0; lane < active; lane++) {
            size_t left = blocks[owner[lane]] - done[lane];
            step = left < step ? left : step;
            into[lane] = states[owner[lane]];
            from[lane] = data[owner[lane]] + 64 * done[lane];
        }
        for (size_t lane = active; lane < LANES; lane++) {
            into[lane] = spare[lane];
            from[lane] = from[0];
        }
        compress(into, from, step);
        size_t kept = 0;
        for (size_t lane = 0; lane < active; lane++)
            if (done[lane] + step < blocks[owner[lane]]) {
                owner[kept] = owner[lane];
                done[kept++] = done[lane] + step;
            }
        active = kept;
    }
}
