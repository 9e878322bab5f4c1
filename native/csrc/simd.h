// Vectors of LANES floats and the few operations the kernels share.
//
// The lane count follows the target: 16 with AVX-512, 8 with AVX2, 4 elsewhere (SSE, NEON). A vector wider than the
// registers would be split by the compiler through the stack, which is several times slower.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#ifndef TORCHCAPS_LANES
#if defined(__AVX512F__)
#define TORCHCAPS_LANES 16
#elif defined(__AVX2__)
#define TORCHCAPS_LANES 8
#else
#define TORCHCAPS_LANES 4
#endif
#endif

#define TC_INLINE inline __attribute__((always_inline))

namespace torchcaps {

template <int W>
struct Wide {
    typedef float f __attribute__((vector_size(4 * W)));
    typedef float unaligned __attribute__((vector_size(4 * W), aligned(4), may_alias));
    typedef int32_t i __attribute__((vector_size(4 * W)));
};

constexpr int LANES = TORCHCAPS_LANES;
using vf = Wide<LANES>::f;
using vi = Wide<LANES>::i;

template <int W>
TC_INLINE typename Wide<W>::f load(const float* p) { return *reinterpret_cast<const typename Wide<W>::unaligned*>(p); }

template <int W>
TC_INLINE void store(float* p, typename Wide<W>::f v) { *reinterpret_cast<typename Wide<W>::unaligned*>(p) = v; }

TC_INLINE vf broadcast(float x) { return x - vf{}; }  // x - 0 keeps -0.0, so the compiler drops the subtraction
TC_INLINE vf max(vf a, vf b) { return a > b ? a : b; }

// e^x for x <= 0, error about one ulp (Cephes' polynomial). Below -87 it stays at e^-87 = 1.6e-38, never a denormal.
TC_INLINE vf exp_nonpositive(vf x) {
    const vf lowest = broadcast(-87.0f);
    x = x < lowest ? lowest : x;
    const vf shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
    const vf n = shifted - 12582912.0f;
    vf r = x - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723212e-6f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    return p * reinterpret_cast<vf>(exponent);
}

TC_INLINE vf square_root(vf x) {
    vf y;
    for (int l = 0; l < LANES; ++l) y[l] = __builtin_sqrtf(x[l]);
    return y;
}

// ---- sums over the lanes, in a fixed order

template <int S, int... K>
TC_INLINE vf swap_lanes(vf a, std::integer_sequence<int, K...>) { return __builtin_shufflevector(a, a, (K ^ S)...); }

template <int S>
TC_INLINE vf swap_lanes(vf a) { return swap_lanes<S>(a, std::make_integer_sequence<int, LANES>{}); }

template <int S = LANES / 2>
TC_INLINE vf sum_all(vf a) {  // the sum, in every lane
    a += swap_lanes<S>(a);
    if constexpr (S > 1) return sum_all<S / 2>(a);
    else return a;
}

template <int S = LANES / 2>
TC_INLINE vf max_all(vf a) {
    a = max(a, swap_lanes<S>(a));
    if constexpr (S > 1) return max_all<S / 2>(a);
    else return a;
}

TC_INLINE float sum_lanes(vf a) { return sum_all(a)[0]; }

// ---- transposition

// One step of the transposition of a W x W block: rows S apart exchange their off-diagonal S x S blocks.
template <int W, int S, int... K>
TC_INLINE void exchange(typename Wide<W>::f& a, typename Wide<W>::f& b, std::integer_sequence<int, K...>) {
    const auto upper = __builtin_shufflevector(a, b, ((K & S) ? W + K - S : K)...);
    b = __builtin_shufflevector(a, b, ((K & S) ? W + K : K + S)...);
    a = upper;
}

template <int W, int S = W / 2>
TC_INLINE void transpose_registers(typename Wide<W>::f* rows) {
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r)
        if (!(r & S)) exchange<W, S>(rows[r], rows[r + S], std::make_integer_sequence<int, W>{});
    if constexpr (S > 1) transpose_registers<W, S / 2>(rows);
}

template <int W>
TC_INLINE void transpose_block(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    typename Wide<W>::f rows[W];
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) rows[r] = load<W>(from + r * from_stride);
    transpose_registers<W>(rows);
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) store<W>(to + r * to_stride, rows[r]);
}

// to[c][r] = from[r][c]
void transpose(const float* from, int64_t from_stride, int rows, int columns, float* to, int64_t to_stride);

// rows -> lanes: to[c] holds column c of up to LANES rows; lanes without a row are zero.
inline void rows_to_lanes(const float* from, int64_t from_stride, int rows, int columns, vf* to) {
    if (rows < LANES)
        for (int c = 0; c < columns; ++c) to[c] = vf{};
    transpose(from, from_stride, rows, columns, reinterpret_cast<float*>(to), LANES);
}

inline void lanes_to_rows(const vf* from, int rows, int columns, float* to, int64_t to_stride) {
    transpose(reinterpret_cast<const float*>(from), LANES, columns, rows, to, to_stride);
}

}  // namespace torchcaps
