/* Sums over samples in the memory of a CPU, in one pass each.

   Every function here says what some calls of PyTorch say as well, and `_kernels.py` makes those
   calls where this file could not be compiled. The second half is compiled twice, by including
   this file once for each type of numbers. Strides are counted in elements. All functions return
   1, or 0 if there was no memory to work in. Those that form a total and squares of contributions
   also give what `ratios` gives for these, for the value of `part`. */

#ifndef REAL

#include <stdint.h>
#include <stdlib.h>
#include <float.h>
#include <math.h>

/* On x86, the widest registers that the machine has. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST
#endif

typedef int64_t I;

#define TILE 512
#define AHEAD 8 /* rows: where they lie far apart, nobody else asks for the next ones in time */
#define ABS(value) ((value) < 0 ? -(value) : (value))

#define REAL float
#define WIDTH 16
#define TINY FLT_MIN
#define NAME(name) name##_float
#include "_kernels.c"
#undef REAL
#undef WIDTH
#undef TINY
#undef NAME

#define REAL double
#define WIDTH 8
#define TINY DBL_MIN
#define NAME(name) name##_double
#include "_kernels.c"

#else

typedef REAL NAME(vec) __attribute__((vector_size(64), aligned(sizeof(REAL))));
#define vec NAME(vec)

/* Sum of total^2 / (squares - part * total^2) over a matrix, and how many squares are not 0. */
FAST int NAME(ratios)(const REAL *total, I total_row, const REAL *squares, I squares_row, I rows,
                       I columns, double part, double *out)
{
    double sum = 0, live = 0;
    REAL p = (REAL)part;
    I pieces = (columns + 4095) / 4096, all = rows * pieces;
#pragma omp parallel for schedule(static) reduction(+ : sum, live) if (rows * columns > 65536)
    for (I piece = 0; piece < all; piece++) {
        I row = piece / pieces, lo = piece % pieces * 4096;
        I n = columns - lo < 4096 ? columns - lo : 4096;
        const REAL *t = total + row * total_row + lo, *s = squares + row * squares_row + lo;
        REAL each = 0;
        int alive = 0;
#pragma omp simd reduction(+ : each, alive)
        for (I i = 0; i < n; i++) {
            REAL q = t[i] * t[i], below = s[i] - p * q;
            below = below < TINY ? TINY : below;
            each += q / below + 0 * s[i]; /* nan for squares that are not finite */
            alive += s[i] != 0;
        }
        sum += each;
        live += alive;
    }
    out[0] = sum;
    out[1] = live;
    return 1;
}

/* (rows, columns) anywhere in memory, to rows of whole vectors with zeros at the end. */
static inline __attribute__((always_inline)) void NAME(pack)(const REAL *from, I row, I column,
                                                             I rows, I columns, REAL *to, I wide)
{
    for (I t = 0; t < rows; t++) {
        const REAL *line = from + t * row;
        __builtin_prefetch(line + AHEAD * row);
        __builtin_prefetch(line + AHEAD * row + WIDTH);
        REAL *put = to + t * wide;
        if (column == 1)
            for (I j = 0; j < columns; j++) put[j] = line[j];
        else
            for (I j = 0; j < columns; j++) put[j] = line[j * column];
        for (I j = columns; j < wide; j++) put[j] = 0;
    }
}

/* Over samples, the sum and the sum of squares of left_i^T right_i, each over r rows: (a, b). */
FAST int NAME(outer)(const REAL *left, I left_sample, I left_row, I left_column, const REAL *right,
                     I right_sample, I right_row, I right_column, I m, I r, I a, I b, REAL *total,
                     REAL *squares, double part, double *out)
{
    I tall = (a + 3) / 4 * 4, tiles = (b + WIDTH - 1) / WIDTH, rows = r == 1 ? m : r;
    REAL *room = malloc((rows * (tall + WIDTH) + 2 * tall * tiles * WIDTH) * sizeof(REAL));
    if (!room) return 0;
    REAL *x = room, *y = x + rows * tall;
    vec *first = (vec *)(y + rows * WIDTH), *second = first + tall * tiles, zero = {0};
    if (r == 1)
        NAME(pack)(left, left_sample, left_column, m, a, x, tall);
    else
        for (I i = 0; i < 2 * tall * tiles; i++) first[i] = zero;
    for (I k = 0; k < (r == 1 ? 1 : m); k++) {
        if (r > 1) NAME(pack)(left + k * left_sample, left_row, left_column, r, a, x, tall);
        for (I tile = 0; tile < tiles; tile++) {
            I at = tile * WIDTH, n = b - at < WIDTH ? b - at : WIDTH;
            const REAL *z = right + k * right_sample + at * right_column;
            I step = r == 1 ? right_sample : right_row;
            if (tall > 4 || right_column != 1 || n < WIDTH) { /* else it is read once, in place */
                NAME(pack)(z, step, right_column, rows, n, y, WIDTH);
                z = y, step = WIDTH;
            }
            vec *f = first + tile * tall, *g = second + tile * tall;
            for (I i = 0; i < tall; i += 4) {
                vec s0 = zero, s1 = zero, s2 = zero, s3 = zero;
                if (r > 1) { /* rows of one sample */
                    for (I t = 0; t < r; t++) {
                        const REAL *u = x + t * tall + i;
                        vec v = *(const vec *)(z + t * step);
                        s0 += v * u[0], s1 += v * u[1], s2 += v * u[2], s3 += v * u[3];
                    }
                    f[i] += s0, f[i + 1] += s1, f[i + 2] += s2, f[i + 3] += s3;
                    g[i] += s0 * s0, g[i + 1] += s1 * s1, g[i + 2] += s2 * s2, g[i + 3] += s3 * s3;
                } else { /* one row of each sample */
                    vec q0 = zero, q1 = zero, q2 = zero, q3 = zero;
                    for (I t = 0; t < m; t++) {
                        const REAL *u = x + t * tall + i;
                        vec v = *(const vec *)(z + t * step);
                        vec e0 = v * u[0], e1 = v * u[1], e2 = v * u[2], e3 = v * u[3];
                        s0 += e0, s1 += e1, s2 += e2, s3 += e3;
                        q0 += e0 * e0, q1 += e1 * e1, q2 += e2 * e2, q3 += e3 * e3;
                    }
                    f[i] = s0, f[i + 1] = s1, f[i + 2] = s2, f[i + 3] = s3;
                    g[i] = q0, g[i + 1] = q1, g[i + 2] = q2, g[i + 3] = q3;
                }
            }
        }
    }
    for (I i = 0; i < a; i++)
        for (I j = 0; j < b; j++) {
            total[i * b + j] = first[j / WIDTH * tall + i][j % WIDTH];
            squares[i * b + j] = second[j / WIDTH * tall + i][j % WIDTH];
        }
    free(room);
    return NAME(ratios)(total, 0, squares, 0, 1, a * b, part, out);
}

/* Over samples, the sum and the sum of squares of the sums over r rows: (w). With x, values are
   multiplied by (x - mean) * scale, where mean and scale have one number for each row. A sum not
   above `faint` times that of the absolute values is nothing but rounding. */
FAST int NAME(columns)(const REAL *values, I sample, I row, I column, I m, I r, I w, double faint,
                       const REAL *x, I x_sample, I x_row, I x_column, const REAL *mean,
                       const REAL *scale, I s_sample, I s_row, REAL *total, REAL *squares,
                       double part, double *out)
{
    I tiles = (w + TILE - 1) / TILE;
    REAL limit = (REAL)faint;
#pragma omp parallel for schedule(static) if (tiles > 1 && m * r * w > 262144)
    for (I tile = 0; tile < tiles; tile++) {
        I lo = tile * TILE, n = w - lo < TILE ? w - lo : TILE;
        REAL each[TILE], size[TILE], *sums = total + lo, *seconds = squares + lo;
        for (I j = 0; j < n; j++) sums[j] = seconds[j] = 0;
        for (I i = 0; i < m; i++) {
            const REAL *v = values + i * sample + lo * column;
            if (r == 1 && !x && column == 1) {
                for (I j = 0; j < n; j++) sums[j] += v[j], seconds[j] += v[j] * v[j];
                continue;
            }
            for (I j = 0; j < n; j++) each[j] = size[j] = 0;
            if (!x && row == 1 && column != 1) { /* channels of images */
                for (I j = 0; j < n; j++) {
                    const REAL *g = v + j * column;
                    REAL e = 0, f = 0;
#pragma omp simd reduction(+ : e, f)
                    for (I t = 0; t < r; t++) e += g[t], f += ABS(g[t]);
                    each[j] = e, size[j] = f;
                }
            } else if (!x && column == 1) {
                for (I t = 0; t < r; t++) {
                    const REAL *g = v + t * row;
                    __builtin_prefetch(g + AHEAD * row);
                    __builtin_prefetch(g + AHEAD * row + WIDTH);
                    for (I j = 0; j < n; j++) each[j] += g[j];
                    if (limit > 0)
                        for (I j = 0; j < n; j++) size[j] += ABS(g[j]);
                }
            } else {
                for (I t = 0; t < r; t++) {
                    const REAL *g = v + t * row;
                    const REAL *y = x ? x + i * x_sample + t * x_row + lo * x_column : g;
                    REAL centre = x ? mean[i * s_sample + t * s_row] : 0;
                    REAL by = x ? scale[i * s_sample + t * s_row] : 1;
                    __builtin_prefetch(g + AHEAD * row);
                    __builtin_prefetch(g + AHEAD * row + WIDTH);
                    __builtin_prefetch(y + AHEAD * x_row);
                    __builtin_prefetch(y + AHEAD * x_row + WIDTH);
                    if (x && column == 1 && x_column == 1)
                        for (I j = 0; j < n; j++) {
                            REAL e = g[j] * ((y[j] - centre) * by);
                            each[j] += e, size[j] += ABS(e);
                        }
                    else
                        for (I j = 0; j < n; j++) {
                            REAL e = g[j * column];
                            if (x) e *= (y[j * x_column] - centre) * by;
                            each[j] += e, size[j] += ABS(e);
                        }
                }
            }
            if (limit > 0)
                for (I j = 0; j < n; j++)
                    if (ABS(each[j]) <= limit * size[j]) each[j] = 0;
            for (I j = 0; j < n; j++) sums[j] += each[j], seconds[j] += each[j] * each[j];
        }
    }
    return NAME(ratios)(total, 0, squares, 0, 1, w, part, out);
}

/* Over samples, the sum and the sum of squares of sum_hw left_i[o, h, w] right_i[c, h, w]: (a, b).
   Strides: sample, channel, height, width. */
FAST int NAME(planes)(const REAL *left, const I *ls, const REAL *right, const I *rs, I m, I a, I b,
                      I high, I wide, REAL *total, REAL *squares, double part, double *out)
{
    I size = high * wide, whole = (size + WIDTH - 1) / WIDTH * WIDTH;
    REAL *room = malloc((a + b) * whole * sizeof(REAL)), *y = room + a * whole;
    if (!room) return 0;
    for (I n = 0; n < a * b; n++) total[n] = squares[n] = 0;
    for (I k = 0; k < m; k++) {
        for (I i = 0; i < a; i++) {
            NAME(pack)(left + k * ls[0] + i * ls[1], ls[2], ls[3], high, wide, room + i * whole, wide);
            for (I n = size; n < whole; n++) room[i * whole + n] = 0;
        }
        for (I j = 0; j < b; j++) {
            NAME(pack)(right + k * rs[0] + j * rs[1], rs[2], rs[3], high, wide, y + j * whole, wide);
            for (I n = size; n < whole; n++) y[j * whole + n] = 0;
        }
        for (I i = 0; i < a; i++)
            for (I j = 0; j < b; j++) {
                vec sum = {0};
                for (I n = 0; n < whole; n += WIDTH)
                    sum += *(vec *)(room + i * whole + n) * *(vec *)(y + j * whole + n);
                REAL e = 0;
                for (int n = 0; n < WIDTH; n++) e += sum[n];
                total[i * b + j] += e;
                squares[i * b + j] += e * e;
            }
    }
    free(room);
    return NAME(ratios)(total, 0, squares, 0, 1, a * b, part, out);
}

#undef vec

#endif
