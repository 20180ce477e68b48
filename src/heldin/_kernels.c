/* Sums over samples in the memory of a CPU, in one pass each.

   Every function here says what some calls of PyTorch say as well, and `_kernels.py` makes those
   calls where this file could not be compiled. The second half is compiled twice, by including
   this file once for each type of numbers. Strides are counted in elements. All functions return
   1, or 0 if there was no memory to work in. Those that form a total and squares of contributions
   also give what `ratios` gives for these, for the value of `part`. */

#ifndef REAL

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <float.h>
#include <math.h>

/* On x86, the widest registers that the machine has. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST
#endif

/* Where the registers of `outer_ratios` are. */
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define REGISTERS __attribute__((target("avx512f")))
#endif

typedef int64_t I;

#define TILE 512
#define PIECE 4096 /* elements of an image */
#define SOON 8 /* lines of memory */
#define MANY 8 /* channels */
#define FEW 256 /* samples that are added up one by one */
#define CHUNKS 4 /* of samples, for several threads; the same however many there are */
#define NEAR (1 << 20) /* bytes that stay in a cache of second level beside others */
#define LARGE 262144 /* products, above which several threads take part */
#define AHEAD 8 /* rows: where they lie far apart, nobody else asks for the next ones in time */
#define NEXT(line, row) \
    (__builtin_prefetch((line) + AHEAD * (row)), __builtin_prefetch((line) + AHEAD * (row) + WIDTH))
#define ABS(value) ((value) < 0 ? -(value) : (value))

/* Memory to work in. Little of it is kept by each thread: taken and given back in every call, it
   would move what PyTorch takes next to it. */
#define KEEP (1 << 20)
static __thread void *kept;
static __thread size_t kept_size;
static pthread_key_t owner; /* lets go of it when the thread ends */
static pthread_once_t started = PTHREAD_ONCE_INIT;

static void start(void)
{
    pthread_key_create(&owner, free);
}

static void *borrow(size_t size)
{
    if (size > KEEP) return malloc(size);
    if (size > kept_size) {
        pthread_once(&started, start);
        free(kept);
        kept = malloc(size);
        kept_size = kept ? size : 0;
        pthread_setspecific(owner, kept);
    }
    return kept;
}

static void give_back(void *room)
{
    if (room != kept) free(room);
}

/* Arguments as numbers: whole ones (w) and real ones (r). */
static int numbers(PyObject *self, PyObject *const *given, Py_ssize_t count, const char *codes,
                   I *whole, double *real)
{
    (void)self;
    for (Py_ssize_t i = 0; codes[i]; i++) {
        if (i == count || (!codes[i + 1] && i + 1 < count)) {
            PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
            return 0;
        }
        if (codes[i] == 'r')
            *real++ = PyFloat_AsDouble(given[i]);
        else
            *whole++ = PyLong_AsLongLong(given[i]);
    }
    return !PyErr_Occurred();
}

#define REAL float
#define WHOLE int32_t
#define WIDTH 16
#define TINY FLT_MIN
#define FLOOR (FLT_MIN * 0x1p17f)
#define VAST 0x1p125f
#define NAME(name) name##_float
#include "_kernels.c"
#undef REAL
#undef WHOLE
#undef WIDTH
#undef TINY
#undef FLOOR
#undef VAST
#undef NAME

#define REAL double
#define WHOLE int64_t
#define WIDTH 8
#define TINY DBL_MIN
#define FLOOR (DBL_MIN * 0x1p17)
#define VAST 0x1p1021
#define NAME(name) name##_double
#include "_kernels.c"
#undef NAME

#else

typedef REAL NAME(vec) __attribute__((vector_size(64), aligned(sizeof(REAL))));
#define vec NAME(vec)

/* Sum of total^2 / (squares - part * total^2) over a matrix, and the number of summands; where it is
   asked for also the largest. Squares below FLOOR count for nothing: too few bits are left. */
FAST int NAME(ratios)(const REAL *total, I total_row, const REAL *squares, I squares_row, I rows,
                       I columns, double part, double *out, double *largest)
{
    double sum = 0, live = 0, top = 0;
    REAL p = (REAL)part;
    I pieces = (columns + 4095) / 4096, all = rows * pieces;
#pragma omp parallel for schedule(static) reduction(+ : sum, live) \
    reduction(max : top) if (rows * columns > 65536)
    for (I piece = 0; piece < all; piece++) {
        I row = piece / pieces, lo = piece % pieces * 4096;
        I n = columns - lo < 4096 ? columns - lo : 4096;
        const REAL *t = total + row * total_row + lo, *s = squares + row * squares_row + lo;
        REAL each = 0, most = 0;
        int alive = 0;
#pragma omp simd reduction(+ : each, alive) reduction(max : most)
        for (I i = 0; i < n; i++) {
            REAL q = t[i] * t[i], below = s[i] - p * q;
            below = below < TINY ? TINY : below;
            REAL ratio = s[i] >= FLOOR ? q / below : 0;
            each += ratio + 0 * s[i]; /* nan for squares that are not finite */
            most = ratio > most ? ratio : most;
            alive += s[i] >= FLOOR;
        }
        sum += each;
        live += alive;
        top = most > top ? most : top;
    }
    out[0] = sum;
    out[1] = live;
    if (largest) *largest = top;
    return 1;
}

/* (rows, columns) anywhere in memory, to rows of whole vectors with zeros at the end. */
static inline __attribute__((always_inline)) void NAME(pack)(const REAL *from, I row, I column,
                                                             I rows, I columns, REAL *to, I wide)
{
    for (I t = 0; t < rows; t++) {
        const REAL *line = from + t * row;
        NEXT(line, row);
        REAL *put = to + t * wide;
        if (column == 1)
            for (I j = 0; j < columns; j++) put[j] = line[j];
        else
            for (I j = 0; j < columns; j++) put[j] = line[j * column];
        for (I j = columns; j < wide; j++) put[j] = 0;
    }
}

/* Adds up the sums of several chunks of samples, in their order, whoever has formed them. */
static inline __attribute__((always_inline)) void NAME(gather)(const REAL *sums, I chunks, I size,
                                                               REAL *total, REAL *squares)
{
    for (I i = 0; i < size; i++) total[i] = sums[i], squares[i] = sums[size + i];
    for (I chunk = 1; chunk < chunks; chunk++) {
        const REAL *more = sums + 2 * size * chunk;
        for (I i = 0; i < size; i++) total[i] += more[i], squares[i] += more[size + i];
    }
}

/* Sums and, `apart` from them, sums of squares of products of columns: of `tall` in x, which has
   its squares `beside`, and of `broad` vectors in y, over n rows of each. */
static inline __attribute__((always_inline)) void NAME(tile)(const REAL *x, I beside,
                                                             const REAL *y, I y_row, I n, int tall,
                                                             int broad, REAL *sums, I row, I apart)
{
    vec s[4][4], q[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < tall; i++)
#pragma GCC unroll 4
        for (int j = 0; j < broad; j++) s[i][j] = q[i][j] = (vec){0};
    for (I k = 0; k < n; k++, x += 2 * beside, y += y_row)
#pragma GCC unroll 4
        for (int j = 0; j < broad; j++) {
            vec v = *(const vec *)(y + j * WIDTH), w = v * v;
#pragma GCC unroll 4
            for (int i = 0; i < tall; i++) s[i][j] += v * x[i], q[i][j] += w * x[beside + i];
        }
#pragma GCC unroll 4
    for (int i = 0; i < tall; i++)
#pragma GCC unroll 4
        for (int j = 0; j < broad; j++) {
            REAL *put = sums + i * row + j * WIDTH;
            *(vec *)put = s[i][j], *(vec *)(put + apart) = q[i][j];
        }
}

/* Over samples, the sum and the sum of squares of left_i^T right_i, each over r rows: (a, b). */
FAST int NAME(outer)(const REAL *left, I left_sample, I left_row, I left_column, const REAL *right,
                     I right_sample, I right_row, I right_column, I m, I r, I a, I b, REAL *total,
                     REAL *squares, double part, double *out)
{
    I tall = a <= 2 && r == 1 ? 2 : (a + 3) / 4 * 4;
    I width = (b + WIDTH - 1) / WIDTH * WIDTH, size = tall * width;
    I work = m * r * a * b, large = work > LARGE / 2, most = work > LARGE ? CHUNKS : 2;
    I chunks = !large ? 1 : m < most ? m : most;
    I rows = r == 1 ? (m + chunks - 1) / chunks : r; /* that are packed at a time */
    int once = tall <= 4 && right_column == 1 && b == width; /* right is read once, in place */
    REAL *room = borrow(chunks * (2 * size + rows * (2 * tall + width)) * sizeof(REAL));
    if (!room) return 0;
    REAL *sums = room, *packed = room + 2 * chunks * size;
#pragma omp parallel for schedule(static) if (large)
    for (I chunk = 0; chunk < chunks; chunk++) {
        REAL *x = packed + chunk * rows * (2 * tall + width), *mine = sums + 2 * chunk * size;
        I from = m * chunk / chunks, to = m * (chunk + 1) / chunks;
        vec zero = {0};
        if (r == 1) { /* all samples at once, one row of each */
            const REAL *y = right + from * right_sample;
            I step = right_sample;
            NAME(pack)(left + from * left_sample, left_sample, left_column, to - from, a, x,
                       2 * tall);
            for (I k = 0; k < to - from; k++) {
                REAL *line = x + 2 * k * tall;
                for (I i = 0; i < tall; i++) line[tall + i] = line[i] * line[i];
            }
            if (!once) {
                REAL *z = x + rows * 2 * tall;
                NAME(pack)(y, step, right_column, to - from, b, z, width);
                y = z, step = width;
            }
            I at = 0, n = to - from;
            for (; tall == 2 && at + 4 * WIDTH <= width; at += 4 * WIDTH)
                NAME(tile)(x, tall, y + at, step, n, 2, 4, mine + at, width, size);
            for (; tall > 2 && at + 2 * WIDTH <= width; at += 2 * WIDTH)
                for (I i = 0; i < tall; i += 4)
                    NAME(tile)(x + i, tall, y + at, step, n, 4, 2, mine + i * width + at, width,
                               size);
            for (; at < width; at += WIDTH)
                for (I i = 0; i < tall; i += 2)
                    NAME(tile)(x + i, tall, y + at, step, n, 2, 1, mine + i * width + at, width,
                               size);
            continue;
        }
        REAL *y = x + rows * tall;
        for (I i = 0; i < 2 * size; i++) mine[i] = 0;
        for (I k = from; k < to; k++) { /* one sample after the other */
            NAME(pack)(left + k * left_sample, left_row, left_column, r, a, x, tall);
            NAME(pack)(right + k * right_sample, right_row, right_column, r, b, y, width);
            for (I at = 0; at < width; at += WIDTH)
                for (I i = 0; i < tall; i += 4) {
                    vec e0 = zero, e1 = zero, e2 = zero, e3 = zero;
                    for (I t = 0; t < r; t++) {
                        const REAL *u = x + t * tall + i;
                        vec v = *(const vec *)(y + t * width + at);
                        e0 += v * u[0], e1 += v * u[1], e2 += v * u[2], e3 += v * u[3];
                    }
                    vec e[4] = {e0, e1, e2, e3};
                    for (int n = 0; n < 4; n++) {
                        REAL *f = mine + (i + n) * width + at;
                        *(vec *)f += e[n], *(vec *)(f + size) += e[n] * e[n];
                    }
                }
        }
    }
    for (I i = 0; i < a; i++) {
        REAL *first = total + i * b, *second = squares + i * b;
        for (I chunk = 0; chunk < chunks; chunk++) {
            const REAL *f = sums + 2 * chunk * size + i * width, *g = f + size;
            if (chunk == 0)
                for (I j = 0; j < b; j++) first[j] = f[j], second[j] = g[j];
            else
                for (I j = 0; j < b; j++) first[j] += f[j], second[j] += g[j];
        }
    }
    give_back(room);
    return NAME(ratios)(total, 0, squares, 0, 1, a * b, part, out, NULL);
}

/* The sums and the sums of squares of few columns that lie in one piece, several rows at a time. */
static inline __attribute__((always_inline)) void NAME(few)(const REAL *values, I m, I w,
                                                            REAL *total, REAL *squares)
{
    vec some = {0}, squared = {0}, first = {0}, second = {0}, zero = {0};
    I size = m * w, at = 0;
    for (; at + WIDTH <= size; at += WIDTH) {
        vec v = *(const vec *)(values + at);
        some += v, squared += v * v;
        if (at / WIDTH % FEW == FEW - 1) { /* long sums lose digits, sums of sums do not */
            first += some, second += squared;
            some = squared = zero;
        }
    }
    first += some, second += squared;
    for (I j = 0; j < w; j++) total[j] = squares[j] = 0;
    for (I j = 0; j < WIDTH; j++) total[j % w] += first[j], squares[j % w] += second[j];
    for (; at < size; at++) {
        total[at % w] += values[at];
        squares[at % w] += values[at] * values[at];
    }
}

/* Over samples, the sum and the sum of squares of the sums over r rows: (w). With x, values are
   multiplied by (x - mean) * scale, where mean and scale have one number for each row. A sum not
   above `faint` times that of the absolute values is nothing but rounding. */
FAST int NAME(columns)(const REAL *values, I sample, I row, I column, I m, I r, I w, double faint,
                       const REAL *x, I x_sample, I x_row, I x_column, const REAL *mean,
                       const REAL *scale, I s_sample, I s_row, REAL *total, REAL *squares,
                       double part, double *out)
{
    int image = !x && row == 1 && column != 1; /* channels, each of which lies in one piece */
    int plain = !x && r == 1 && column == 1;
    if (plain && sample == w && w > 0 && WIDTH % w == 0 && m * w <= LARGE / 16) {
        NAME(few)(values, m, w, total, squares);
        return NAME(ratios)(total, 0, squares, 0, 1, w, part, out, NULL);
    }
    I tiles = (w + TILE - 1) / TILE;
    I chunks = m < CHUNKS ? m : CHUNKS;
    REAL limit = (REAL)faint, *sums = borrow(2 * chunks * w * sizeof(REAL));
    if (!sums) return 0;
#pragma omp parallel for schedule(static) if (m * r * w > LARGE / 16)
    for (I unit = 0; unit < tiles * chunks; unit++) {
        I chunk = unit / tiles, lo = unit % tiles * TILE, n = w - lo < TILE ? w - lo : TILE;
        REAL each[TILE], size[TILE], some[TILE], squared[TILE];
        REAL *first = sums + 2 * chunk * w + lo, *second = first + w;
        I start = m * chunk / chunks, stop = m * (chunk + 1) / chunks;
        for (I j = 0; j < n; j++) first[j] = second[j] = some[j] = squared[j] = 0;
        for (I i = start; i < stop; i++) {
            const REAL *v = values + i * sample + lo * column;
            if ((i - start) % FEW == FEW - 1) /* long sums lose digits, sums of sums do not */
                for (I j = 0; j < n; j++) {
                    first[j] += some[j], second[j] += squared[j];
                    some[j] = squared[j] = 0;
                }
            if (plain) {
                __builtin_prefetch(v + sample);
                for (I j = 0; j < n; j++) some[j] += v[j], squared[j] += v[j] * v[j];
                continue;
            }
            for (I j = 0; j < n; j++) each[j] = size[j] = 0;
            if (image) {
                for (I j = 0; j < n; j++) {
                    const REAL *g = v + j * column;
                    REAL e = 0, f = 0;
                    if (limit > 0) {
#pragma omp simd reduction(+ : e, f)
                        for (I t = 0; t < r; t++) e += g[t], f += ABS(g[t]);
                    } else {
#pragma omp simd reduction(+ : e)
                        for (I t = 0; t < r; t++) e += g[t];
                    }
                    each[j] = e, size[j] = f;
                }
            } else if (!x && column == 1) {
                for (I t = 0; t < r; t++) {
                    const REAL *g = v + t * row;
                    NEXT(g, row);
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
                    NEXT(g, row);
                    NEXT(y, x_row);
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
            for (I j = 0; j < n; j++) some[j] += each[j], squared[j] += each[j] * each[j];
        }
        for (I j = 0; j < n; j++) first[j] += some[j], second[j] += squared[j];
    }
    NAME(gather)(sums, chunks, w, total, squares);
    give_back(sums);
    return NAME(ratios)(total, 0, squares, 0, 1, w, part, out, NULL);
}

/* Points of some channels, one after the other, each with all channels and zeros at the end. */
static inline __attribute__((always_inline)) void NAME(points)(const REAL *from, const I *strides,
                                                               I channels, I high, I wide, I all,
                                                               REAL *to)
{
    for (I c = 0; c < channels; c++) /* soon the next sample's */
        for (I n = 0; n < SOON / 2; n++)
            __builtin_prefetch(from + strides[0] + c * strides[1] + n * WIDTH);
    for (I h = 0; h < high; h++)
        for (I w = 0; w < wide; w++, to += all) {
            const REAL *point = from + h * strides[2] + w * strides[3];
            for (I c = 0; c < channels; c++) to[c] = point[c * strides[1]];
            for (I c = channels; c < all; c++) to[c] = 0;
        }
}

/* Over samples, the sum and the sum of squares of sum_hw left_i[o, h, w] right_i[c, h, w]: (a, b).
   Strides: sample, channel, height, width. */
FAST int NAME(planes)(const REAL *left, const I *ls, const REAL *right, const I *rs, I m, I a, I b,
                      I high, I wide, REAL *total, REAL *squares, double part, double *out)
{
    if (high < 1 || wide < 1) high = wide = 0; /* they do not meet at all */
    I lines = wide < 1 || PIECE / wide < 1 ? 1 : PIECE / wide; /* that are packed at a time */
    if (lines > high) lines = high;
    I whole = (lines * wide + WIDTH - 1) / WIDTH * WIDTH, chunks = m < CHUNKS ? m : CHUNKS;
    /* With many channels vectors lie across them: none has to be added up. */
    I tall = b < MANY ? a : (a + 3) / 4 * 4, broad = b < MANY ? b : (b + WIDTH - 1) / WIDTH * WIDTH;
    I working = (tall + broad) * whole + a * b;
    REAL *room = borrow(chunks * (working + 2 * a * b) * sizeof(REAL));
    if (!room) return 0;
    REAL *rest = room + 2 * chunks * a * b;
#pragma omp parallel for schedule(static) if (m * high * wide * a * b > LARGE / 8)
    for (I chunk = 0; chunk < chunks; chunk++) {
        REAL *first = room + 2 * chunk * a * b, *second = first + a * b;
        REAL *each = rest + chunk * working, *x = each + a * b, *y = x + tall * whole;
        for (I n = 0; n < 2 * a * b; n++) first[n] = 0;
        for (I k = m * chunk / chunks; k < m * (chunk + 1) / chunks; k++) {
            for (I n = 0; n < a * b; n++) each[n] = 0;
            for (I h = 0; h < high; h += lines) {
                I now = high - h < lines ? high - h : lines;
                const REAL *l = left + k * ls[0] + h * ls[2], *r = right + k * rs[0] + h * rs[2];
                if (b < MANY) {
                    for (I i = 0; i < a + b; i++) { /* channels of both, and soon the next sample's */
                        const REAL *from = i < a ? l + i * ls[1] : r + (i - a) * rs[1];
                        const REAL *next = from + (i < a ? ls[0] : rs[0]);
                        for (I n = 0; n < SOON; n++) __builtin_prefetch(next + n * WIDTH);
                        NAME(pack)(from, i < a ? ls[2] : rs[2], i < a ? ls[3] : rs[3], now, wide,
                                   x + i * whole, wide);
                        for (I n = now * wide; n < whole; n++) x[i * whole + n] = 0;
                    }
                    for (I i = 0; i < a; i++)
                        for (I j = 0; j < b; j++) {
                            vec sum = {0};
                            for (I n = 0; n < whole; n += WIDTH)
                                sum += *(vec *)(x + i * whole + n) * *(vec *)(y + j * whole + n);
                            for (int n = 0; n < WIDTH; n++) each[i * b + j] += sum[n];
                        }
                    continue;
                }
                NAME(points)(l, ls, a, now, wide, tall, x);
                NAME(points)(r, rs, b, now, wide, broad, y);
                for (I at = 0; at < broad; at += WIDTH)
                    for (I i = 0; i < a; i += 4) {
                        vec s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
                        for (I n = 0; n < now * wide; n++) {
                            const REAL *u = x + n * tall + i;
                            vec v = *(const vec *)(y + n * broad + at);
                            s0 += v * u[0], s1 += v * u[1], s2 += v * u[2], s3 += v * u[3];
                        }
                        vec s[4] = {s0, s1, s2, s3};
                        for (I o = 0; o < 4 && i + o < a; o++)
                            for (I c = 0; c < WIDTH && at + c < b; c++)
                                each[(i + o) * b + at + c] += s[o][c];
                    }
            }
            for (I n = 0; n < a * b; n++) first[n] += each[n], second[n] += each[n] * each[n];
        }
    }
    NAME(gather)(room, chunks, a * b, total, squares);
    give_back(room);
    return NAME(ratios)(total, 0, squares, 0, 1, a * b, part, out, NULL);
}

/* What `ratios` gives for a matrix of known totals, (a, b), where the squares are those of
   left_i^T right_i, over r rows for each of m samples. A tile of squares is formed in registers and
   never kept. Returns 0 on machines without these registers. */
#ifdef REGISTERS

typedef WHOLE NAME(bits) __attribute__((vector_size(64), aligned(sizeof(REAL))));
#define bits NAME(bits)
#define TALL 14 /* with two vectors side by side, most of the 32 registers */
#define BROAD (2 * WIDTH)

/* Some columns of (m, r, ...) anywhere in memory, to rows of `wide` with zeros at the end. With one
   row for each sample they are squared: a square of a product is a product of squares. */
REGISTERS static inline __attribute__((always_inline)) void
NAME(pack_all)(const REAL *from, I sample, I row, I column, I m, I r, I columns, I wide, REAL *to)
{
    for (I k = 0; k < m * r; k++, to += wide) {
        const REAL *line = from + k / r * sample + k % r * row;
        if (column == 1 && columns == wide)
            for (I j = 0; j < wide; j++) to[j] = line[j];
        else
            for (I j = 0; j < wide; j++) to[j] = j < columns ? line[j * column] : 0;
        for (I j = 0; r == 1 && j < wide; j++) to[j] *= to[j];
    }
}

REGISTERS static inline __attribute__((always_inline)) vec NAME(over)(vec above, vec below)
{
    if (sizeof(REAL) == 8) return above / below;
    vec inverse = (vec)_mm512_rcp14_ps((__m512)below); /* 14 bits, then twice as many */
    return above * (inverse * (2 - below * inverse));
}

/* Adds up total^2 / (squares - part total^2) and the number of live coordinates of one tile, and
   keeps the largest summand. */
REGISTERS static inline __attribute__((always_inline)) void
NAME(tile_ratios)(const REAL *u, const REAL *v, I m, I r, const REAL *total, I row, REAL part,
                  vec *sum, bits *live, vec *top)
{
    vec s[TALL][2], q[TALL][2];
    memset(q, 0, sizeof(q));
    for (I k = 0; k < (r == 1 ? 1 : m); k++) {
#pragma GCC unroll 14
        for (int n = 0; n < TALL; n++) s[n][0] = s[n][1] = (vec){0};
        for (I t = 0; t < (r == 1 ? m : r); t++, u += TALL, v += BROAD) {
            vec v0 = *(const vec *)v, v1 = *(const vec *)(v + WIDTH);
#pragma GCC unroll 14
            for (int n = 0; n < TALL; n++) s[n][0] += v0 * u[n], s[n][1] += v1 * u[n];
        }
        if (r == 1) continue; /* these are squares already */
#pragma GCC unroll 14
        for (int n = 0; n < TALL; n++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) q[n][half] += s[n][half] * s[n][half];
    }
#pragma GCC unroll 14
    for (int n = 0; n < TALL; n++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            vec t = *(const vec *)(total + n * row + half * WIDTH);
            vec squares = r == 1 ? s[n][half] : q[n][half], tiny = (vec){0} + TINY;
            t *= t;
            vec below = squares - part * t;
            bits low = below < tiny, bad = ~(squares <= VAST);
            below = (vec)(((bits)below & ~low) | ((bits)tiny & low));
            bits enough = squares >= FLOOR;
            vec ratio = (vec)((bits)NAME(over)(t, below) & enough);
            bits more = ratio > *top;
            *top = (vec)(((bits)ratio & more) | ((bits)*top & ~more));
            *sum += ratio;
            *sum += (vec)(bad & (bits)((vec){0} + (REAL)__builtin_nan("")));
            *live -= enough;
        }
}

REGISTERS static int NAME(all_tiles)(const REAL *left, I left_sample, I left_row, I left_column,
                                     const REAL *right, I right_sample, I right_row,
                                     I right_column, I m, I r, I a, I b, const REAL *total, I row,
                                     double part, double *out)
{
    I high = (a + TALL - 1) / TALL, wide = (b + BROAD - 1) / BROAD;
    I group = (I)(NEAR / (m * r * BROAD * sizeof(REAL))); /* of columns that stay in the cache */
    if (group < 1) group = 1;
    if (group > wide) group = wide;
    REAL *y = malloc(group * BROAD * m * r * sizeof(REAL)), p = (REAL)part;
    double *sums = calloc(3 * high, sizeof(double));
    int failed = !y || !sums;
#pragma omp parallel if (!failed && m * r * a * b > LARGE)
    {
        REAL *x = failed ? NULL : malloc(TALL * m * r * sizeof(REAL));
        if (!x) {
#pragma omp atomic write
            failed = 1;
        }
        for (I start = 0; start < wide; start += group) {
            I stop = start + group < wide ? start + group : wide;
#pragma omp for schedule(static)
            for (I j = start; j < stop; j++) {
                I w = b - j * BROAD < BROAD ? b - j * BROAD : BROAD;
                if (y)
                    NAME(pack_all)(right + j * BROAD * right_column, right_sample, right_row,
                                   right_column, m, r, w, BROAD, y + (j - start) * BROAD * m * r);
            }
#pragma omp for schedule(static)
            for (I i = 0; i < high; i++) {
                I h = a - i * TALL < TALL ? a - i * TALL : TALL;
                vec sum = {0}, top = {0};
                bits live = {0};
                if (!x || !sums) continue;
                NAME(pack_all)(left + i * TALL * left_column, left_sample, left_row, left_column, m,
                               r, h, TALL, x);
                for (I j = start; j < stop; j++) {
                    const REAL *t = total + i * TALL * row + j * BROAD;
                    const REAL *v = y + (j - start) * BROAD * m * r;
                    I w = b - j * BROAD < BROAD ? b - j * BROAD : BROAD, next = row;
                    REAL edge[TALL * BROAD];
                    for (I n = 0; n < h; n++) {
                        __builtin_prefetch(t + n * row + BROAD);
                        __builtin_prefetch(t + n * row + BROAD + WIDTH);
                    }
                    if (h < TALL || w < BROAD) {
                        memset(edge, 0, sizeof(edge));
                        for (I n = 0; n < h; n++)
                            memcpy(edge + n * BROAD, t + n * row, w * sizeof(REAL));
                        t = edge, next = BROAD;
                    }
                    if (r == 1)
                        NAME(tile_ratios)(x, v, m, 1, t, next, p, &sum, &live, &top);
                    else
                        NAME(tile_ratios)(x, v, m, r, t, next, p, &sum, &live, &top);
                }
                for (int n = 0; n < WIDTH; n++) {
                    sums[3 * i] += sum[n], sums[3 * i + 1] += (double)live[n];
                    if (top[n] > sums[3 * i + 2]) sums[3 * i + 2] = top[n];
                }
            }
        }
        free(x);
    }
    out[0] = out[1] = out[2] = 0;
    for (I i = 0; i < high && !failed; i++) {
        out[0] += sums[3 * i], out[1] += sums[3 * i + 1];
        if (sums[3 * i + 2] > out[2]) out[2] = sums[3 * i + 2];
    }
    free(sums);
    free(y);
    return !failed;
}

#undef bits
#undef TALL
#undef BROAD
#endif

int NAME(outer_ratios)(const REAL *left, I left_sample, I left_row, I left_column,
                       const REAL *right, I right_sample, I right_row, I right_column, I m, I r,
                       I a, I b, const REAL *total, I row, double part, double *out)
{
#ifdef REGISTERS
    if (m > 0 && r > 0 && __builtin_cpu_supports("avx512f"))
        return NAME(all_tiles)(left, left_sample, left_row, left_column, right, right_sample,
                               right_row, right_column, m, r, a, b, total, row, part, out);
#endif
    return 0;
}

/* The same for Python: addresses of tensors and `out` are numbers. */
#define ARGUMENTS PyObject *self, PyObject *const *given, Py_ssize_t count
#define AT(n) ((REAL *)(intptr_t)w[n])
#define OUT(n) ((double *)(intptr_t)w[n])

static PyObject *NAME(py_ratios)(ARGUMENTS)
{
    I w[6];
    double part, out[3];
    if (!numbers(self, given, count, "wwwwwwr", w, &part)) return NULL;
    if (!w[0] || !w[2]) Py_RETURN_NONE; /* a tensor of zeros may have no memory */
    Py_BEGIN_ALLOW_THREADS
    NAME(ratios)(AT(0), w[1], AT(2), w[3], w[4], w[5], part, out, out + 2);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("ddd", out[0], out[1], out[2]);
}

static PyObject *NAME(py_outer_ratios)(ARGUMENTS)
{
    I w[14];
    double part, out[3];
    int done;
    if (!numbers(self, given, count, "wwwwwwwwwwwwwwr", w, &part)) return NULL;
    if (!w[0] || !w[4] || !w[12]) Py_RETURN_NONE;
    Py_BEGIN_ALLOW_THREADS
    done = NAME(outer_ratios)(AT(0), w[1], w[2], w[3], AT(4), w[5], w[6], w[7], w[8], w[9], w[10],
                              w[11], AT(12), w[13], part, out);
    Py_END_ALLOW_THREADS
    if (!done) Py_RETURN_NONE;
    return Py_BuildValue("ddd", out[0], out[1], out[2]);
}

static PyObject *NAME(py_outer)(ARGUMENTS)
{
    I w[15];
    double part;
    if (!numbers(self, given, count, "wwwwwwwwwwwwwwrw", w, &part)) return NULL;
    if (!w[0] || !w[4]) Py_RETURN_FALSE;
    return PyBool_FromLong(NAME(outer)(AT(0), w[1], w[2], w[3], AT(4), w[5], w[6], w[7], w[8], w[9],
                                       w[10], w[11], AT(12), AT(13), part, OUT(14)));
}

static PyObject *NAME(py_columns)(ARGUMENTS)
{
    I w[18];
    double r[2]; /* faint and part */
    if (!numbers(self, given, count, "wwwwwwwrwwwwwwwwwwrw", w, r)) return NULL;
    if (!w[0]) Py_RETURN_FALSE;
    return PyBool_FromLong(NAME(columns)(AT(0), w[1], w[2], w[3], w[4], w[5], w[6], r[0], AT(7),
                                         w[8], w[9], w[10], AT(11), AT(12), w[13], w[14], AT(15),
                                         AT(16), r[1], OUT(17)));
}

static PyObject *NAME(py_planes)(ARGUMENTS)
{
    I w[18];
    double part;
    if (!numbers(self, given, count, "wwwwwwwwwwwwwwwwwrw", w, &part)) return NULL;
    if ((!w[0] || !w[5]) && w[13] > 0 && w[14] > 0) Py_RETURN_FALSE;
    return PyBool_FromLong(NAME(planes)(AT(0), w + 1, AT(5), w + 6, w[10], w[11], w[12], w[13],
                                        w[14], AT(15), AT(16), part, OUT(17)));
}

#undef vec

#endif
