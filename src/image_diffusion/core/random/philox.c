/* The random numbers of streams.py on a CPU: Philox4x32-10 (Salmon et al. 2011) and what is made of its words, a number
   at a time instead of a hundred operations on a whole batch. The words are those of `streams.philox4x32`, bit for bit,
   and what is made of them is computed in the same way.

   Plain C without Python's headers: draws_compiled.py calls it by ctypes, which lets other threads run meanwhile. */

#include <math.h>
#include <stdint.h>

enum kind { UNIFORM, NORMAL, GUMBEL, INTEGERS };

/* Four words for a counter, in its place. */
static void philox4x32(uint32_t c[4], uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)c[0] * 0xD2511F53u, product1 = (uint64_t)c[2] * 0xCD9E8D57u;
        c[0] = (uint32_t)(product1 >> 32) ^ c[1] ^ k0;
        c[1] = (uint32_t)product1;
        c[2] = (uint32_t)(product0 >> 32) ^ c[3] ^ k1;
        c[3] = (uint32_t)product0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* The word as a number between 0 and 1, neither of them. */
static double inside(uint32_t word) { return (word + 0.5) * 0x1p-32; }

/* Two normal numbers from two words, by Box and Muller's transform. */
static void normal(const uint32_t words[2], float *out) {
    double radius = sqrt(-2.0 * log(inside(words[0])));
    double angle = words[1] * (2.0 * 3.141592653589793 * 0x1p-32);
    out[0] = (float)(radius * cos(angle));
    out[1] = (float)(radius * sin(angle));
}

/* Draw [rows, count] numbers into `out`, float, or int64_t below `high` for integers. epoch, sample: [rows]. */
void draw(int kind, uint32_t k0, uint32_t k1, const int64_t *epoch, const int64_t *sample, int64_t rows, int64_t count,
          int64_t high, void *out) {
    for (int64_t row = 0; row < rows; row++) {
        float *numbers = (float *)out + row * count;
        int64_t *integers = (int64_t *)out + row * count;
        for (int64_t first = 0; first < count; first += 4) {
            uint32_t words[4] = {(uint32_t)(first / 4), (uint32_t)epoch[row], (uint32_t)sample[row],
                                 (uint32_t)((uint64_t)sample[row] >> 32)};
            float pairs[4];
            philox4x32(words, k0, k1);
            if (kind == NORMAL)
                for (int i = 0; i < 4 && first + i < count; i += 2) normal(words + i, pairs + i);
            for (int i = 0; i < 4 && first + i < count; i++) {
                if (kind == UNIFORM) numbers[first + i] = (float)(words[i] >> 8) * 0x1p-24f;
                else if (kind == NORMAL) numbers[first + i] = pairs[i];
                else if (kind == GUMBEL) numbers[first + i] = (float)-log(-log(inside(words[i])));
                else integers[first + i] = (int64_t)(((uint64_t)words[i] * (uint64_t)high) >> 32);
            }
        }
    }
}
