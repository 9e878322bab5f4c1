// What the passes share: pose shapes known at compile time or not, votes, softmax over parents, norms of votes.
#pragma once
#include "simd.h"

namespace torchcaps {

// A pose shape; Shape<0, 0, 0> reads its sizes at run time.
template <int R_, int P_, int Q_>
struct Shape {
    int r, p, q;
    static constexpr bool fixed = R_ > 0;
    constexpr int R() const { return fixed ? R_ : r; }
    constexpr int P() const { return fixed ? P_ : p; }
    constexpr int Q() const { return fixed ? Q_ : q; }
    constexpr int RP() const { return R() * P(); }
    constexpr int RQ() const { return R() * Q(); }
    constexpr int PQ() const { return P() * Q(); }
};

// use(r * Q + q, u) for every entry of the vote u = x W. Pose and weight are vectors or scalars, at least one a vector.
template <class S, class X, class W, class Use>
TC_INLINE void each_vote(const S shape, const X* x, const W* w, Use&& use) {
    const int R = shape.R(), P = shape.P(), Q = shape.Q();
    if constexpr (S::fixed) {
#pragma GCC unroll 4
        for (int q = 0; q < Q; ++q) {
            W column[S{}.P()];  // read before `use` stores anything, or the compiler reads it again for every row
#pragma GCC unroll 16
            for (int p = 0; p < P; ++p) column[p] = w[p * Q + q];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                vf u = x[r * P] * column[0];
#pragma GCC unroll 16
                for (int p = 1; p < P; ++p) u += x[r * P + p] * column[p];
                use(r * Q + q, u);
            }
        }
    } else {
        for (int r = 0; r < R; ++r) {
            int q = 0;
            for (; q + 4 <= Q; q += 4) {  // four sums side by side hide the latency of one
                vf a = x[r * P] * w[q], b = x[r * P] * w[q + 1], c = x[r * P] * w[q + 2], d = x[r * P] * w[q + 3];
                for (int p = 1; p < P; ++p) {
                    const X xp = x[r * P + p];
                    const W* wp = w + p * Q + q;
                    a += xp * wp[0];
                    b += xp * wp[1];
                    c += xp * wp[2];
                    d += xp * wp[3];
                }
                use(r * Q + q, a);
                use(r * Q + q + 1, b);
                use(r * Q + q + 2, c);
                use(r * Q + q + 3, d);
            }
            for (; q < Q; ++q) {
                vf a = x[r * P] * w[q];
                for (int p = 1; p < P; ++p) a += x[r * P + p] * w[p * Q + q];
                use(r * Q + q, a);
            }
        }
    }
}

// Logits of one child, a vector for each parent, become couplings.
TC_INLINE void softmax(vf* b, int J, bool leaky) {
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

// g_j becomes d_j = c_j (g_j - sum_k c_k g_k).
TC_INLINE void softmax_backward(const vf* c, vf* g, int J) {
    vf mean{};
    for (int j = 0; j < J; ++j) mean += c[j] * g[j];
    for (int j = 0; j < J; ++j) g[j] = c[j] * (g[j] - mean);
}

// 1 / |u| from the sum of squares, 0 where that is 0 (|u| below 1e-22). Where it left the range that float32 squares well,
// from votes scaled by 2^80.
template <class U>
TC_INLINE vf inverse_norm(vf squares, const U* u, int count) {
    const vf low = broadcast(1e-30f), high = broadcast(1e30f);
    const vi outside = ((squares < low) & (squares > vf{})) | (squares > high);
    vf scale = broadcast(1.0f);
    bool any = false;
    for (int l = 0; l < LANES; ++l) any |= outside[l] != 0;
    if (any) {
        scale = squares < low ? broadcast(0x1p80f) : scale;
        scale = squares > high ? broadcast(0x1p-80f) : scale;
        squares = vf{};
        for (int e = 0; e < count; ++e) {
            const vf v = u[e] * scale;
            squares += v * v;
        }
    }
    const vf inverse = scale / square_root(squares);
    return squares > vf{} ? inverse : vf{};
}

// Gradient of a vote through its direction: (a - n <n, a>) / |u| with n = u / |u|, a = sum_k d^k state^k.
template <class State>
TC_INLINE void direction_gradient(const State* state, int64_t round_stride, int rounds, const vf* d, int64_t d_stride,
                                  const vf* u, vf inverse, int count, vf* to) {
    vf along{};
    for (int e = 0; e < count; ++e) {
        vf a{};
        for (int k = 0; k < rounds; ++k) a += d[k * d_stride] * state[k * round_stride + e];
        to[e] = a;
        along += u[e] * inverse * a;
    }
    for (int e = 0; e < count; ++e) to[e] = inverse * (to[e] - u[e] * inverse * along);
}

// out[e] = sum over the lanes of v[e]
inline void sum_lanes_each(const vf* v, int64_t count, float* out) {
    int64_t e = 0;
    for (; e + LANES <= count; e += LANES) {
        vf block[LANES];
        for (int l = 0; l < LANES; ++l) block[l] = v[e + l];
        transpose_registers<LANES>(block);
        vf total = block[0];
        for (int l = 1; l < LANES; ++l) total += block[l];
        store<LANES>(out + e, total);
    }
    for (; e < count; ++e) out[e] = sum_lanes(v[e]);
}

constexpr int SUM_BLOCK = 64;  // terms added one after the other before the sum moves on: bounds the rounding error

}  // namespace torchcaps
