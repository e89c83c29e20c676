/* Pillow's resize of 8-bit images, byte for byte, of the part that is kept: several times as fast, since it is written
   for compilers to vectorize. Pillow's arithmetic (src/libImaging/Resample.c of Pillow 13.0): one pass along each axis;
   weights of float64 whose sum is 1, rounded to 22 bits; sums of int32, rounded and clipped to 8 bits after each pass.

   Plain C without Python's headers: compiled.py calls it by ctypes, which lets other threads run meanwhile. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

#define INLINE static inline __attribute__((always_inline))
#define BITS 22
#define HALF (1 << (BITS - 1))
#define BLOCK 64

/* One pixel of the output along an axis: the pixels it is made of and their weights. */
typedef struct {
    int first, count;
    const int32_t *weights;
} Taps;

/* The head of an array as Arrow's C data interface lays it out. */
struct array {
    int64_t length, null_count, offset, n_buffers, n_children;
    const void **buffers;
    struct array **children;
};

/* The pixels that Pillow shares: the values of the array, or of its child where a pixel has four bytes. */
const void *shared_pixels(const struct array *image) {
    return image->n_children ? image->children[0]->buffers[1] : image->buffers[1];
}

static double box(double x) { return x > -0.5 && x <= 0.5 ? 1.0 : 0.0; }

/* Keys 1981, with a = -1/2. */
static double bicubic(double x) {
    x = x < 0.0 ? -x : x;
    if (x < 1.0) return (1.5 * x - 2.5) * x * x + 1;
    if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * -0.5;
    return 0.0;
}

/* The taps of the pixels [from, from + kept) when `size` pixels become `scaled`; to be freed. NULL: no memory. */
static Taps *taps_of(int size, int scaled, int from, int kept, int is_bicubic) {
    double scale = (double)size / scaled, stretch = scale < 1.0 ? 1.0 : scale, inverse = 1.0 / stretch;
    is_bicubic = is_bicubic && size != scaled; /* else the pixels stay as they are, which a box of one pixel does */
    double support = (is_bicubic ? 2.0 : 0.5) * stretch;
    size_t most = 2 * (size_t)(support + 1.0) + 1;
    Taps *taps = malloc(kept * (sizeof(Taps) + most * sizeof(int32_t)) + most * sizeof(double));
    if (taps == NULL) return NULL;
    double *exact = (double *)(taps + kept);
    int32_t *weights = (int32_t *)(exact + most);
    for (int i = 0; i < kept; i++, weights += most) {
        double centre = (from + i + 0.5) * scale, sum = 0.0;
        int first = (int)(centre - support + 0.5), end = (int)(centre + support + 0.5);
        first = first < 0 ? 0 : first;
        end = end > size ? size : end;
        for (int k = 0; k < end - first; k++) {
            double x = (k + first - centre + 0.5) * inverse;
            sum += exact[k] = is_bicubic ? bicubic(x) : box(x);
        }
        for (int k = 0; k < end - first; k++) {
            double weight = (sum != 0.0 ? exact[k] / sum : exact[k]) * (1 << BITS);
            weights[k] = (int32_t)(weight < 0 ? weight - 0.5 : weight + 0.5);
        }
        taps[i] = (Taps){first, end - first, weights};
    }
    return taps;
}

static int end_of(const Taps *taps, int kept) { return taps[kept - 1].first + taps[kept - 1].count; }

/* n bytes, each the weighted sum of numbers that lie `stride` apart in `in`. A macro, since `in` is bytes or int32. */
#define BLEND(in, stride, taps, n, out)                                \
    do {                                                               \
        int32_t sum[BLOCK];                                            \
        for (int i = 0; i < (n); i++) sum[i] = HALF;                   \
        for (int k = 0; k < (taps)->count; k++)                        \
            for (int i = 0; i < (n); i++)                              \
                sum[i] += (in)[k * (stride) + i] * (taps)->weights[k]; \
        for (int i = 0; i < (n); i++) {                                \
            int32_t value = sum[i] >> BITS;                            \
            (out)[i] = value < 0 ? 0 : value > 255 ? 255 : value;      \
        }                                                              \
    } while (0)

/* Rows of n bytes, of which `in` is the one numbered `origin` -> one row of the output. */
FOR_EACH_CPU static void down(const uint8_t *restrict in, int origin, size_t stride, const Taps *taps, size_t n,
                              uint8_t *restrict out) {
    in += (taps->first - origin) * stride;
    for (; n >= BLOCK; n -= BLOCK, in += BLOCK, out += BLOCK) BLEND(in, stride, taps, BLOCK, out);
    BLEND(in, stride, taps, (int)n, out);
}

/* As many rows as have BLOCK bytes in one column, or the fewer that there are -> each shorter, `kept` pixels of `bands`
   bytes. `in` is the first pixel that is used. The columns are laid out as rows first and widened, so that a pixel of
   all these rows is made at once. */
INLINE void turn_and_blend(const uint8_t *restrict in, size_t stride, int rows, int bands, const Taps *taps, int kept,
                           int32_t *restrict turned, uint8_t *restrict out) {
    int first = taps[0].first, end = end_of(taps, kept), most = BLOCK / bands;
    for (int row = 0; row < most; row++) {
        const uint8_t *from = in + (row < rows ? row : rows - 1) * stride;
        for (int x = 0; x < end - first; x++)
            for (int band = 0; band < bands; band++)
                turned[(size_t)x * BLOCK + row * bands + band] = from[(size_t)x * bands + band];
    }
    for (int x = 0; x < kept; x++) {
        const int32_t *columns = turned + (size_t)(taps[x].first - first) * BLOCK;
        uint8_t column[BLOCK];
        BLEND(columns, BLOCK, taps + x, BLOCK, column);
        for (int row = 0; row < most && row < rows; row++)
            memcpy(out + ((size_t)row * kept + x) * bands, column + row * bands, bands);
    }
}

FOR_EACH_CPU static void across(const uint8_t *in, size_t stride, int rows, int bands, const Taps *taps, int kept,
                                int32_t *turned, uint8_t *out) {
    if (bands == 4) turn_and_blend(in, stride, rows, 4, taps, kept, turned, out);
    else turn_and_blend(in, stride, rows, 1, taps, kept, turned, out);
}

/* Resize an image of width x height pixels of `bands` bytes (1 or 4) to scaled_width x scaled_height, and write of that
   the part of kept_width x kept_height whose corner is (left, top). Returns 0, or -1 where there is no memory. */
int resize(const uint8_t *in, int bands, int width, int height, int is_bicubic, int scaled_width, int scaled_height,
           int left, int top, int kept_width, int kept_height, uint8_t *out) {
    Taps *x = taps_of(width, scaled_width, left, kept_width, is_bicubic);
    Taps *y = taps_of(height, scaled_height, top, kept_height, is_bicubic);
    uint8_t *between = NULL;
    int32_t *turned = NULL;
    if (x && y) {
        int rows = end_of(y, kept_height) - y[0].first, columns = end_of(x, kept_width) - x[0].first;
        size_t stride = (size_t)width * bands, part = (size_t)columns * bands, short_row = (size_t)kept_width * bands;
        /* Pillow 13 begins with the height where that loses more than twice as many pixels as the width. */
        int width_first = height <= scaled_height || height - scaled_height <= 2 * (int64_t)(width - scaled_width);
        int step = BLOCK / bands;
        in += y[0].first * stride + (size_t)x[0].first * bands;
        between = malloc(width_first ? rows * short_row : kept_height * part);
        turned = malloc((size_t)columns * BLOCK * sizeof(int32_t));
        if (between && turned && width_first) {
            for (int i = 0; i < rows; i += step)
                across(in + i * stride, stride, rows - i, bands, x, kept_width, turned, between + i * short_row);
            for (int i = 0; i < kept_height; i++)
                down(between, y[0].first, short_row, y + i, short_row, out + i * short_row);
        } else if (between && turned) {
            for (int i = 0; i < kept_height; i++) down(in, y[0].first, stride, y + i, part, between + i * part);
            for (int i = 0; i < kept_height; i += step)
                across(between + i * part, part, kept_height - i, bands, x, kept_width, turned, out + i * short_row);
        }
    }
    int failed = !between || !turned;
    free(x), free(y), free(between), free(turned);
    return -failed;
}
