// Parts of the kernels that are the same for all of them.
#include "votes.h"

namespace torchcaps {
namespace {

template <int W>
void transpose_band(const float* from, int64_t from_stride, int rows, int columns, float* to, int64_t to_stride) {
    if constexpr (W == 1) {
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
    } else {
        const int whole_rows = rows / W * W, whole_columns = columns / W * W;
        for (int r = 0; r < whole_rows; r += W)
            for (int c = 0; c < whole_columns; c += W)
                transpose_block<W>(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
        constexpr int half = W > 4 ? W / 2 : 1;
        if (whole_columns < columns && whole_rows > 0)
            transpose_band<half>(from + whole_columns, from_stride, whole_rows, columns - whole_columns,
                                 to + whole_columns * to_stride, to_stride);
        if (whole_rows < rows)
            transpose_band<half>(from + whole_rows * from_stride, from_stride, rows - whole_rows, columns,
                                 to + whole_rows, to_stride);
    }
}

// Lane l of the result is the sum over the lanes of v[l]: halves of two vectors become one, over and over.
template <int S = LANES / 2>
TC_INLINE vf sum_lanes_of(vf* v) {
#pragma GCC unroll 8
    for (int r = 0; r < S; ++r) {
        exchange<LANES, S>(v[r], v[r + S], std::make_integer_sequence<int, LANES>{});
        v[r] += v[r + S];
    }
    if constexpr (S > 1) return sum_lanes_of<S / 2>(v);
    else return v[0];
}

}  // namespace

void transpose(const float* from, int64_t from_stride, int rows, int columns, float* to, int64_t to_stride) {
    transpose_band<LANES>(from, from_stride, rows, columns, to, to_stride);
}

void softmax(vf* b, int J, bool leaky) {
    vf top = leaky ? vf{} : b[0];
    for (int j = 0; j < J; ++j) top = max(top, b[j]);
    vf total = leaky ? exp_nonpositive(-top) : vf{};
    for (int j = 0; j < J; ++j) {
        b[j] = exp_nonpositive(b[j] - top);
        total += b[j];
    }
    const vf share = 1.0f / total;
    for (int j = 0; j < J; ++j) b[j] *= share;
}

// Where the squares leave float32's range, from votes scaled by 2^80.
vf inverse_norm(const vf* u, int count) {
    const vf low = broadcast(1e-30f), high = broadcast(1e30f);
    vf squares = inner(u, u, count), scale = broadcast(1.0f);
    const vi outside = ((squares < low) & (squares > vf{})) | (squares > high);
    bool any = false;
    for (int l = 0; l < LANES; ++l) any |= outside[l] != 0;
    if (any) {
        scale = squares < low ? broadcast(0x1p80f) : scale;
        scale = squares > high ? broadcast(0x1p-80f) : scale;
        squares = vf{};
        for (int e = 0; e < count; ++e) squares += (u[e] * scale) * (u[e] * scale);
    }
    const vf inverse = scale / square_root(squares);
    return squares > vf{} ? inverse : vf{};
}

void sum_lanes_each(const vf* v, int64_t count, float* to) {
    int64_t e = 0;
    for (; e + LANES <= count; e += LANES) {
        vf block[LANES];
#pragma GCC unroll 16
        for (int l = 0; l < LANES; ++l) block[l] = v[e + l];
        store<LANES>(to + e, sum_lanes_of(block));
    }
    for (; e < count; ++e) to[e] = sum_lanes(v[e]);
}

void add_parts(const float* parts, int64_t count, int64_t size, float* to) {
    for (int64_t e = 0; e < size; ++e) to[e] = parts[e];
    for (int64_t k = 1; k < count; ++k)
        for (int64_t e = 0; e < size; ++e) to[e] += parts[k * size + e];
}

void flush(vf* sum, vf* total, int64_t count) {
    for (int64_t e = 0; e < count; ++e) {
        total[e] += sum[e];
        sum[e] = vf{};
    }
}

}  // namespace torchcaps
