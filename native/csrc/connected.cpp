// Fully connected capsules: every child votes for every parent through a matrix of its own (or one shared by all).
//
// Two arrangements of the same passes:
//   wide   lanes = rows of the batch. Weights are scalars read in place; poses are turned tile by tile.
//   deep   lanes = children, for small batches. The weights of LANES children are turned parent by parent.
// Which one runs depends on the sizes alone. Sums over children are cut into chunks that depend on the sizes alone, and
// every output has one owner: results are bitwise the same for every thread count.
#include <algorithm>
#include <new>

#include "parallel.h"
#include "torchcaps_native.h"
#include "votes.h"

namespace torchcaps {
namespace {

using Problem = tc_connected;

constexpr int TILE = 8;  // children whose poses are turned together

int64_t weight_stride(const Problem& c) { return c.shared ? 0 : c.J * c.P * c.Q; }

bool use_deep(const Problem& c) {
    // work of the two in units of one full vector, an estimate: turning the weights costs as much as four rows
    const double wide = double(ceil_div(c.N, LANES) * LANES);
    const double deep = (c.N * 1.2 + 4) * double(ceil_div(c.I, LANES) * LANES) / double(c.I);
    return c.N <= 2 * LANES && deep < wide;
}

// Children are cut into `count` chunks of `length`: enough of them to share out, few enough to add up cheaply.
struct Chunks {
    int64_t length, count;
    Chunks(int64_t children, int64_t wanted, int64_t multiple) {
        wanted = std::max<int64_t>(1, std::min<int64_t>(wanted, 16));
        length = ceil_div(ceil_div(children, wanted), multiple) * multiple;
        count = ceil_div(children, length);
    }
};

// ------------------------------------------------------------------------------------------------ lanes = batch rows

// Poses of up to TILE children in up to LANES rows: as rows (for the gradient of the weight) and turned (for the votes).
struct Poses {
    float* rows;  // [LANES][stride]
    vf* turned;   // [children * RP]
    int64_t stride;

    static int64_t vectors(int64_t RP) { return 2 * TILE * RP; }
    Poses(Scratch& scratch, int64_t RP)
        : rows(reinterpret_cast<float*>(scratch.vectors(TILE * RP))), turned(scratch.vectors(TILE * RP)), stride(TILE * RP) {}

    void load(const Problem& c, int64_t n0, int n, int64_t i, int children) {
        const int64_t RP = c.R * c.P;
        for (int l = 0; l < n; ++l)  // rows first: in place they may all fall into one set of the cache
            std::memcpy(rows + l * stride, c.poses + ((n0 + l) * c.I + i) * RP, sizeof(float) * children * RP);
        rows_to_lanes(rows, stride, n, static_cast<int>(children * RP), turned);
    }
};

TC_INLINE vf mask_of(const Problem& c, int64_t n0, int n, int64_t i) {
    vf m = broadcast(1.0f);
    if (c.mask != nullptr)
        for (int l = 0; l < n; ++l) m[l] = c.mask[(n0 + l) * c.I + i] ? 1.0f : 0.0f;
    return m;
}

// from [N][count] -> to [blocks][group of this array][count] of vectors
void pack_rows(const Problem& c, const float* from, int64_t count, vf* to, int64_t block_stride) {
    parallel_for(ceil_div(c.N, LANES), static_cast<int>(c.threads), [&](int64_t b) {
        const int n = static_cast<int>(std::min<int64_t>(LANES, c.N - b * LANES));
        rows_to_lanes(from + b * LANES * count, count, n, static_cast<int>(count), to + b * block_stride);
    });
}

// Children i0 .. i1 of one block of rows: out = sum_i c_ij u_ij, or sum_i d_ij u_ij.
template <class S, bool COSINE, bool BACKWARD>
void wide_walk(const Problem& c, const S shape, const vf* state, const vf* grad, int64_t i0, int64_t i1, int64_t n0, int n,
               vf* out) {
    constexpr int PAIR = 2;  // children whose votes wait for their softmax together
    const int J = static_cast<int>(c.J), RP = shape.RP(), RQ = shape.RQ(), PQ = shape.PQ(), JRQ = J * RQ;
    Scratch scratch(Poses::vectors(RP) + PAIR * int64_t{JRQ} + PAIR * J + 2 * J + JRQ);
    Poses poses(scratch, RP);
    vf* votes = scratch.vectors(PAIR * int64_t{JRQ});
    vf* share = scratch.vectors(PAIR * J);
    vf* g = scratch.vectors(J);
    vf* inverse = scratch.vectors(J);
    vf* sum = scratch.vectors(JRQ);
    for (int e = 0; e < JRQ; ++e) out[e] = sum[e] = vf{};

    const auto couple = [&](int64_t i, const vf* turned, vf* v, vf* b) __attribute__((always_inline)) {
        const float* w = c.weight + i * weight_stride(c);
        vf local[S::fixed ? shape.RP() : 1];
        const vf* x = turned;
        if constexpr (S::fixed) {
#pragma GCC unroll 16
            for (int e = 0; e < RP; ++e) local[e] = turned[e];
            x = local;
        }
        for (int j = 0; j < J; ++j) {
            const vf *sj = state + j * RQ, *gj = BACKWARD ? grad + j * RQ : nullptr;
            vf* vj = v + j * RQ;
            vf agreement{}, pull{}, squares{};
            each_vote(shape, x, w + j * PQ, [&](int e, vf u) __attribute__((always_inline)) {
                vj[e] = u;
                agreement += u * sj[e];
                if constexpr (BACKWARD) pull += u * gj[e];
                if constexpr (COSINE) squares += u * u;
            });
            if constexpr (COSINE) {
                inverse[j] = inverse_norm(squares, vj, RQ);
                agreement *= inverse[j];
            }
            if (c.prior != nullptr) agreement += c.prior[i * J + j];
            b[j] = agreement;
            if constexpr (BACKWARD) g[j] = pull;
        }
        softmax(b, J, c.leaky);
        if constexpr (BACKWARD) {
            softmax_backward(b, g, J);
            for (int j = 0; j < J; ++j) b[j] = COSINE ? g[j] * inverse[j] : g[j];
        }
        if (c.mask != nullptr) {
            const vf m = mask_of(c, n0, n, i);
            for (int j = 0; j < J; ++j) b[j] *= m;
        }
    };

    int waiting = 0;
    for (int64_t i = i0; i < i1; i += TILE) {
        const int children = static_cast<int>(std::min<int64_t>(TILE, i1 - i));
        poses.load(c, n0, n, i, children);
        int k = 0;
        for (; k + PAIR <= children; k += PAIR) {
            for (int s = 0; s < PAIR; ++s) couple(i + k + s, poses.turned + (k + s) * RP, votes + s * JRQ, share + s * J);
            for (int j = 0; j < J; ++j) {
                const vf c0 = share[j], c1 = share[J + j];
                const vf *v0 = votes + j * RQ, *v1 = v0 + JRQ;
                vf* sj = sum + j * RQ;
#pragma GCC unroll 4
                for (int e = 0; e < RQ; ++e) sj[e] += c0 * v0[e] + c1 * v1[e];
            }
        }
        for (; k < children; ++k) {
            couple(i + k, poses.turned + k * RP, votes, share);
            for (int j = 0; j < J; ++j)
                for (int e = 0; e < RQ; ++e) sum[j * RQ + e] += share[j] * votes[j * RQ + e];
        }
        waiting += children;
        if (waiting >= SUM_BLOCK || i + TILE >= i1) {
            for (int e = 0; e < JRQ; ++e) {
                out[e] += sum[e];
                sum[e] = vf{};
            }
            waiting = 0;
        }
    }
}

// Children i0 .. i1 of one block of rows: out = sum_i u_ij. Sums of a few parents' entries stay in registers over a tile.
template <class S>
void wide_sum(const Problem& c, const S shape, int64_t i0, int64_t i1, int64_t n0, int n, vf* out) {
    const int R = shape.R(), P = shape.P(), Q = shape.Q(), RP = shape.RP(), RQ = shape.RQ(), PQ = shape.PQ();
    const int64_t J = c.J;
    Scratch scratch(Poses::vectors(RP) + RP);
    Poses poses(scratch, RP);
    for (int64_t e = 0; e < J * RQ; ++e) out[e] = vf{};
    for (int64_t i = i0; i < i1; i += TILE) {
        const int children = static_cast<int>(std::min<int64_t>(TILE, i1 - i));
        poses.load(c, n0, n, i, children);
        if (c.mask != nullptr)
            for (int t = 0; t < children; ++t) {
                const vf m = mask_of(c, n0, n, i + t);
                for (int e = 0; e < RP; ++e) poses.turned[t * RP + e] *= m;
            }
        const auto columns = [&](auto width, int64_t j, int r, int q) __attribute__((always_inline)) {
            constexpr int W = decltype(width)::value;
            vf sum[W];
            for (int k = 0; k < W; ++k) sum[k] = vf{};
            for (int t = 0; t < children; ++t) {
                const float* w = c.weight + (i + t) * weight_stride(c) + j * PQ + q;
                const vf* x = poses.turned + t * RP + r * P;
#pragma GCC unroll 8
                for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
                    for (int k = 0; k < W; ++k) sum[k] += w[p * Q + k] * x[p];
            }
            for (int k = 0; k < W; ++k) out[j * RQ + r * Q + q + k] += sum[k];
        };
        for (int64_t j = 0; j < J; ++j)
            for (int r = 0; r < R; ++r) {
                int q = 0;
                for (; q + 8 <= Q; q += 8) columns(std::integral_constant<int, 8>{}, j, r, q);
                for (; q + 4 <= Q; q += 4) columns(std::integral_constant<int, 4>{}, j, r, q);
                for (; q < Q; ++q) columns(std::integral_constant<int, 1>{}, j, r, q);
            }
    }
}

// state null: the plain sum of votes
template <class S, bool COSINE, bool BACKWARD>
void wide_pass(const Problem& c, const S shape, const float* state, const float* grad, float* out) {
    const int64_t blocks = ceil_div(c.N, LANES), JRQ = c.J * c.R * c.Q;
    const Chunks chunks(c.I, std::min<int64_t>(ceil_div(64, blocks), ceil_div(c.I, 32)), TILE);
    const int threads = static_cast<int>(c.threads);
    Buffer packed(blocks * JRQ * LANES * (BACKWARD ? 2 : 1)), partial(chunks.count * blocks * JRQ * LANES);
    if (state != nullptr) pack_rows(c, state, JRQ, packed.vectors(), JRQ);
    if (BACKWARD) pack_rows(c, grad, JRQ, packed.vectors() + blocks * JRQ, JRQ);
    parallel_for(chunks.count * blocks, threads, [&](int64_t task) {
        const int64_t chunk = task / blocks, b = task % blocks, i0 = chunk * chunks.length;
        const int n = static_cast<int>(std::min<int64_t>(LANES, c.N - b * LANES));
        const int64_t i1 = std::min(i0 + chunks.length, c.I);
        const vf* states = packed.vectors() + b * JRQ;
        vf* to = partial.vectors() + task * JRQ;
        if (state == nullptr) wide_sum(c, shape, i0, i1, b * LANES, n, to);
        else wide_walk<S, COSINE, BACKWARD>(c, shape, states, states + blocks * JRQ, i0, i1, b * LANES, n, to);
    });
    parallel_for(blocks, threads, [&](int64_t b) {
        const int n = static_cast<int>(std::min<int64_t>(LANES, c.N - b * LANES));
        vf* total = partial.vectors() + b * JRQ;
        for (int64_t chunk = 1; chunk < chunks.count; ++chunk) {
            const vf* more = partial.vectors() + (chunk * blocks + b) * JRQ;
            for (int64_t e = 0; e < JRQ; ++e) total[e] += more[e];
        }
        lanes_to_rows(total, n, static_cast<int>(JRQ), out + b * LANES * JRQ, JRQ);
    });
}

// The gradient of the weight of one child sums over the batch. Vector poses of 8 or 16 entries sum over the lanes at once,
// with lanes = entries of the pose: dw [J, Q, P] of floats. Others keep a vector of lanes for each entry: [J, P, Q].
template <class S>
constexpr bool sums_over_lanes() { return S::fixed && S{}.R() == 1 && S{}.P() % 8 == 0 && S{}.Q() % 8 == 0; }

template <class S>
TC_INLINE void add_weight_gradient(const float* x, int64_t stride, int n, const float* du, float* dw) {
    constexpr int P = S{}.P(), Q = S{}.Q(), W = P % LANES == 0 ? LANES : (LANES < 8 ? LANES : 8), BLOCK = 8;
    using v = typename Wide<W>::f;
    for (int p = 0; p < P; p += W)
        for (int q = 0; q < Q; q += BLOCK) {
            v total[BLOCK];
#pragma GCC unroll 8
            for (int k = 0; k < BLOCK; ++k) total[k] = v{};
            const float* row = x + p;
#pragma GCC unroll 4
            for (int l = 0; l < n; ++l, row += stride) {
                const v xl = load<W>(row);
#pragma GCC unroll 8
                for (int k = 0; k < BLOCK; ++k) total[k] += du[(q + k) * LANES + l] * xl;
            }
#pragma GCC unroll 8
            for (int k = 0; k < BLOCK; ++k) store<W>(dw + (q + k) * P + p, load<W>(dw + (q + k) * P + p) + total[k]);
        }
}

// GROUP rounds from `first` on: agreements and pulls of one child on one evaluation of its votes.
template <class S, bool COSINE, int GROUP, class X, class W, class State>
TC_INLINE void rounds_of_vote(const S shape, const X* x, const W* w, const State* state, int64_t round_stride,
                              int64_t grad_offset, vf* b, vf* g, int64_t b_stride, vf* votes, vf* inverse) {
    vf agreement[GROUP], pull[GROUP], squares{};
#pragma GCC unroll 4
    for (int k = 0; k < GROUP; ++k) agreement[k] = pull[k] = vf{};
    each_vote(shape, x, w, [&](int e, vf u) __attribute__((always_inline)) {
        if constexpr (COSINE) {
            votes[e] = u;
            squares += u * u;
        }
#pragma GCC unroll 4
        for (int k = 0; k < GROUP; ++k) {
            agreement[k] += u * state[k * round_stride + e];
            pull[k] += u * state[k * round_stride + grad_offset + e];
        }
    });
    if constexpr (COSINE) *inverse = inverse_norm(squares, votes, shape.RQ());
    for (int k = 0; k < GROUP; ++k) {
        b[k * b_stride] = COSINE ? agreement[k] * *inverse : agreement[k];
        g[k * b_stride] = pull[k];
    }
}

template <class S, bool COSINE, int ROUNDS>
void wide_full(const Problem& c, const S shape, int64_t K, const float* states, const float* grads, const float* uniform,
               float* d_poses, float* d_weight, float* d_prior) {
    constexpr bool BY_LANES = sums_over_lanes<S>();
    const int rounds = ROUNDS ? ROUNDS : static_cast<int>(K);
    const int J = static_cast<int>(c.J), RP = shape.RP(), RQ = shape.RQ(), PQ = shape.PQ(), R = shape.R(), P = shape.P(), Q = shape.Q();
    const int64_t JRQ = int64_t{J} * RQ, JPQ = int64_t{J} * PQ, blocks = ceil_div(c.N, LANES);
    const int threads = static_cast<int>(c.threads);

    // [block][round][state, grad][JRQ], then uniform
    const int64_t per_block = (2 * rounds + 1) * JRQ;
    Buffer packed(blocks * per_block * LANES);
    for (int k = 0; k < rounds; ++k) {
        pack_rows(c, states + k * c.N * JRQ, JRQ, packed.vectors() + 2 * k * JRQ, per_block);
        pack_rows(c, grads + k * c.N * JRQ, JRQ, packed.vectors() + (2 * k + 1) * JRQ, per_block);
    }
    if (uniform != nullptr) pack_rows(c, uniform, JRQ, packed.vectors() + 2 * rounds * JRQ, per_block);

    const int64_t dw_vectors = BY_LANES ? ceil_div(JPQ, LANES) : JPQ;
    const int tile = dw_vectors <= 1024 ? TILE : 2;  // their gradients stay in the second cache
    const int held = c.shared ? 1 : tile;
    const int64_t length = c.shared ? Chunks(c.I, 16, tile).length : tile, count = ceil_div(c.I, length);
    Buffer partial(c.shared ? count * JPQ : 1);

    parallel_for(count, threads, [&](int64_t task) {
        Scratch scratch(Poses::vectors(RP) + held * dw_vectors + tile * int64_t{J} + 2 * int64_t{rounds} * J + TILE * RP +
                        2 * RQ + J + (COSINE ? JRQ : 0));
        Poses poses(scratch, RP);
        vf* dw = scratch.vectors(held * dw_vectors);
        vf* dp = scratch.vectors(tile * int64_t{J});
        vf* share = scratch.vectors(int64_t{rounds} * J);
        vf* pull = scratch.vectors(int64_t{rounds} * J);
        vf* dx = scratch.vectors(TILE * RP);
        vf* du = scratch.vectors(RQ);
        vf* direction = scratch.vectors(RQ);
        vf* inverse = scratch.vectors(J);
        vf* votes = scratch.vectors(COSINE ? JRQ : 0);
        const int64_t begin = task * length, end = std::min(begin + length, c.I);

        const auto finish_weight = [&](const vf* held_dw, float* to) {
            if constexpr (BY_LANES) {
                const float* from = reinterpret_cast<const float*>(held_dw);
                for (int j = 0; j < J; ++j) transpose(from + j * PQ, P, Q, P, to + j * PQ, Q);
            } else {
                sum_lanes_each(held_dw, JPQ, to);
            }
        };
        const auto clear = [&] {
            for (int64_t e = 0; e < held * dw_vectors; ++e) dw[e] = vf{};
        };

        if (c.shared) clear();
        for (int64_t i0 = begin; i0 < end; i0 += tile) {
            const int children = static_cast<int>(std::min<int64_t>(tile, end - i0));
            if (!c.shared) clear();
            for (int e = 0; e < children * J; ++e) dp[e] = vf{};
            for (int64_t block = 0; block < blocks; ++block) {
                const int64_t n0 = block * LANES;
                const int n = static_cast<int>(std::min<int64_t>(LANES, c.N - n0));
                const vf *state = packed.vectors() + block * per_block, *flat = state + 2 * rounds * JRQ;
                poses.load(c, n0, n, i0, children);
                for (int t = 0; t < children; ++t) {
                    const int64_t i = i0 + t;
                    const float* w = c.weight + i * weight_stride(c);
                    vf* dwt = dw + (c.shared ? 0 : t) * dw_vectors;
                    vf local[S::fixed ? shape.RP() : 1];
                    const vf* x = poses.turned + t * RP;
                    if constexpr (S::fixed) {
#pragma GCC unroll 16
                        for (int e = 0; e < RP; ++e) local[e] = x[e];
                        x = local;
                    }
                    for (int j = 0; j < J; ++j) {
                        const auto some = [&](auto group, int k) __attribute__((always_inline)) {
                            rounds_of_vote<S, COSINE, decltype(group)::value>(
                                shape, x, w + j * PQ, state + 2 * k * JRQ + j * RQ, 2 * JRQ, JRQ, share + k * J + j,
                                pull + k * J + j, J, votes + (COSINE ? j * RQ : 0), inverse + j);
                        };
                        if constexpr (ROUNDS > 0) {
                            some(std::integral_constant<int, ROUNDS>{}, 0);
                        } else {
                            int k = 0;
                            for (; k + 2 <= rounds; k += 2) some(std::integral_constant<int, 2>{}, k);
                            if (k < rounds) some(std::integral_constant<int, 1>{}, k);
                        }
                    }
                    const vf m = mask_of(c, n0, n, i);
                    for (int k = 0; k < rounds; ++k) {
                        vf *b = share + k * J, *g = pull + k * J;
                        if (c.prior != nullptr)
                            for (int j = 0; j < J; ++j) b[j] += c.prior[i * J + j];
                        softmax(b, J, c.leaky);
                        softmax_backward(b, g, J);
                        if (c.mask != nullptr)
                            for (int j = 0; j < J; ++j) {
                                b[j] *= m;
                                g[j] *= m;
                            }
                        if (d_prior != nullptr)
                            for (int j = 0; j < J; ++j) dp[t * J + j] += g[j];
                    }
                    vf grad_x[S::fixed ? shape.RP() : 1];
                    vf* dxt = dx + t * RP;
                    if constexpr (S::fixed) dxt = grad_x;
                    for (int e = 0; e < RP; ++e) dxt[e] = vf{};
                    for (int j = 0; j < J; ++j) {
                        const float* wj = w + j * PQ;
                        vf cj[ROUNDS ? ROUNDS : 1], dj[ROUNDS ? ROUNDS : 1];
                        if constexpr (ROUNDS > 0) {
#pragma GCC unroll 4
                            for (int k = 0; k < ROUNDS; ++k) {
                                cj[k] = share[k * J + j];
                                dj[k] = pull[k * J + j];
                            }
                        }
                        if constexpr (COSINE)
                            direction_gradient(state + j * RQ, 2 * JRQ, rounds, pull + j, J, votes + j * RQ, inverse[j], RQ,
                                               direction);
                        const auto gradient = [&](int e) __attribute__((always_inline)) {
                            const int64_t at = j * RQ + e;
                            vf a = uniform != nullptr ? m * flat[at] : vf{};
                            if constexpr (ROUNDS > 0) {
#pragma GCC unroll 4
                                for (int k = 0; k < ROUNDS; ++k) {
                                    a += cj[k] * state[(2 * k + 1) * JRQ + at];
                                    a += dj[k] * state[2 * k * JRQ + at];
                                }
                            } else {
                                for (int k = 0; k < rounds; ++k) {
                                    a += share[k * J + j] * state[(2 * k + 1) * JRQ + at];
                                    if constexpr (!COSINE) a += pull[k * J + j] * state[2 * k * JRQ + at];
                                }
                            }
                            if constexpr (COSINE) a += direction[e];
                            return a;
                        };
                        if constexpr (S::fixed) {
#pragma GCC unroll 4
                            for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
                                for (int r = 0; r < R; ++r) {
                                    const vf a = gradient(r * Q + q);
                                    du[r * Q + q] = a;
#pragma GCC unroll 16
                                    for (int p = 0; p < P; ++p) dxt[r * P + p] += wj[p * Q + q] * a;
                                }
                        } else {
                            for (int e = 0; e < RQ; ++e) du[e] = gradient(e);
                            for (int r = 0; r < R; ++r)
                                for (int p = 0; p < P; ++p) {
                                    vf a = dxt[r * P + p];
                                    for (int q = 0; q < Q; ++q) a += wj[p * Q + q] * du[r * Q + q];
                                    dxt[r * P + p] = a;
                                }
                        }
                        if constexpr (BY_LANES) {
                            add_weight_gradient<S>(poses.rows + t * RP, poses.stride, n, reinterpret_cast<float*>(du),
                                                reinterpret_cast<float*>(dwt) + j * PQ);
                        } else {
                            vf* to = dwt + int64_t{j} * PQ;
                            const vf* xt = poses.turned + t * RP;
                            for (int p = 0; p < P; ++p)
                                for (int q = 0; q < Q; ++q) {
                                    vf a = to[p * Q + q];
#pragma GCC unroll 4
                                    for (int r = 0; r < R; ++r) a += xt[r * P + p] * du[r * Q + q];
                                    to[p * Q + q] = a;
                                }
                        }
                    }
                    if constexpr (S::fixed)
                        for (int e = 0; e < RP; ++e) dx[t * RP + e] = grad_x[e];
                }
                lanes_to_rows(dx, n, children * RP, d_poses + (n0 * c.I + i0) * RP, c.I * RP);
            }
            if (!c.shared)
                for (int t = 0; t < children; ++t) finish_weight(dw + t * dw_vectors, d_weight + (i0 + t) * JPQ);
            if (d_prior != nullptr) sum_lanes_each(dp, int64_t{children} * J, d_prior + i0 * J);
        }
        if (c.shared) finish_weight(dw, partial.floats() + task * JPQ);
    });
    if (c.shared)
        for (int64_t e = 0; e < JPQ; ++e) {
            float total = 0.0f;
            for (int64_t k = 0; k < count; ++k) total += partial.floats()[k * JPQ + e];
            d_weight[e] = total;
        }
}

// ---------------------------------------------------------------------------------------------------- lanes = children

// One block of up to LANES children.
struct Children {
    int64_t i;
    int m;
    Children(const Problem& c, int64_t block) : i(block * LANES), m(static_cast<int>(std::min<int64_t>(LANES, c.I - i))) {}

    void load_poses(const Problem& c, vf* x) const {  // x [N][RP]
        const int64_t RP = c.R * c.P;
        for (int64_t n = 0; n < c.N; ++n)
            rows_to_lanes(c.poses + (n * c.I + i) * RP, RP, m, static_cast<int>(RP), x + n * RP);
    }
    void load_weight(const Problem& c, int64_t j, vf* w) const {  // w [PQ]
        const int64_t PQ = c.P * c.Q;
        if (c.shared)
            for (int64_t e = 0; e < PQ; ++e) w[e] = broadcast(c.weight[j * PQ + e]);
        else
            rows_to_lanes(c.weight + (i * c.J + j) * PQ, c.J * PQ, m, static_cast<int>(PQ), w);
    }
    void load_prior(const Problem& c, vf* prior) const {
        if (c.prior != nullptr) rows_to_lanes(c.prior + i * c.J, c.J, m, static_cast<int>(c.J), prior);
    }
    vf mask(const Problem& c, int64_t n) const {  // lanes without a child have pose 0 and take part in nothing
        vf take = broadcast(1.0f);
        if (c.mask != nullptr)
            for (int l = 0; l < m; ++l) take[l] = c.mask[n * c.I + i + l] ? 1.0f : 0.0f;
        return take;
    }
};

template <class S, bool COSINE, bool BACKWARD>
void deep_pass(const Problem& c, const S shape, const float* state, const float* grad, float* out) {
    const int J = static_cast<int>(c.J), RP = shape.RP(), RQ = shape.RQ(), PQ = shape.PQ();
    const int64_t N = c.N, JRQ = int64_t{J} * RQ, blocks = ceil_div(c.I, LANES);
    const Chunks chunks(blocks, 16, 1);
    Buffer partial(chunks.count * N * JRQ);
    parallel_for(chunks.count, static_cast<int>(c.threads), [&](int64_t chunk) {
        Scratch scratch(N * RP + PQ + 2 * N * JRQ + 3 * N * J + J);
        vf* x = scratch.vectors(N * RP);
        vf* w = scratch.vectors(PQ);
        vf* votes = scratch.vectors(N * JRQ);
        vf* sum = scratch.vectors(N * JRQ);
        vf* share = scratch.vectors(N * J);
        vf* pull = scratch.vectors(N * J);
        vf* inverse = scratch.vectors(N * J);
        vf* prior = scratch.vectors(J);
        for (int64_t e = 0; e < N * JRQ; ++e) sum[e] = vf{};
        for (int64_t block = chunk * chunks.length; block < std::min((chunk + 1) * chunks.length, blocks); ++block) {
            const Children some(c, block);
            some.load_poses(c, x);
            some.load_prior(c, prior);
            if (state == nullptr && c.mask != nullptr)
                for (int64_t n = 0; n < N; ++n)
                    for (int e = 0; e < RP; ++e) x[n * RP + e] *= some.mask(c, n);
            for (int j = 0; j < J; ++j) {
                some.load_weight(c, j, w);
                if (state == nullptr) {
                    for (int64_t n = 0; n < N; ++n) {
                        vf* sum_j = sum + n * JRQ + j * RQ;
                        each_vote(shape, x + n * RP, w, [&](int e, vf u) __attribute__((always_inline)) { sum_j[e] += u; });
                    }
                    continue;
                }
                for (int64_t n = 0; n < N; ++n) {
                    const float *sj = state + n * JRQ + j * RQ, *gj = BACKWARD ? grad + n * JRQ + j * RQ : nullptr;
                    vf* vj = votes + n * JRQ + j * RQ;
                    vf agreement{}, drag{}, squares{};
                    each_vote(shape, x + n * RP, w, [&](int e, vf u) __attribute__((always_inline)) {
                        vj[e] = u;
                        agreement += u * sj[e];
                        if constexpr (BACKWARD) drag += u * gj[e];
                        if constexpr (COSINE) squares += u * u;
                    });
                    if constexpr (COSINE) {
                        inverse[n * J + j] = inverse_norm(squares, vj, RQ);
                        agreement *= inverse[n * J + j];
                    }
                    share[n * J + j] = c.prior != nullptr ? agreement + prior[j] : agreement;
                    if constexpr (BACKWARD) pull[n * J + j] = drag;
                }
            }
            for (int64_t n = 0; n < (state == nullptr ? 0 : N); ++n) {
                vf* b = share + n * J;
                softmax(b, J, c.leaky);
                if constexpr (BACKWARD) {
                    vf* g = pull + n * J;
                    softmax_backward(b, g, J);
                    for (int j = 0; j < J; ++j) b[j] = COSINE ? g[j] * inverse[n * J + j] : g[j];
                }
                if (c.mask != nullptr) {
                    const vf take = some.mask(c, n);
                    for (int j = 0; j < J; ++j) b[j] *= take;
                }
                for (int j = 0; j < J; ++j)
                    for (int64_t e = n * JRQ + j * RQ; e < n * JRQ + (j + 1) * RQ; ++e) sum[e] += b[j] * votes[e];
            }
        }
        sum_lanes_each(sum, N * JRQ, partial.floats() + chunk * N * JRQ);
    });
    for (int64_t e = 0; e < N * JRQ; ++e) out[e] = partial.floats()[e];
    for (int64_t chunk = 1; chunk < chunks.count; ++chunk)
        for (int64_t e = 0; e < N * JRQ; ++e) out[e] += partial.floats()[chunk * N * JRQ + e];
}

template <class S, bool COSINE, int ROUNDS>
void deep_full(const Problem& c, const S shape, int64_t K, const float* states, const float* grads, const float* uniform,
               float* d_poses, float* d_weight, float* d_prior) {
    const int rounds = ROUNDS ? ROUNDS : static_cast<int>(K);
    const int J = static_cast<int>(c.J), RP = shape.RP(), RQ = shape.RQ(), PQ = shape.PQ(), R = shape.R(), P = shape.P(), Q = shape.Q();
    const int64_t N = c.N, JRQ = int64_t{J} * RQ, JPQ = int64_t{J} * PQ, blocks = ceil_div(c.I, LANES);
    const Chunks chunks(blocks, 16, 1);
    // [N][round][state, grad][JRQ]
    Buffer interleaved(N * rounds * 2 * JRQ), partial(c.shared ? chunks.count * JPQ : 1);
    for (int64_t n = 0; n < N; ++n)
        for (int k = 0; k < rounds; ++k) {
            float* to = interleaved.floats() + (n * rounds + k) * 2 * JRQ;
            std::memcpy(to, states + (k * N + n) * JRQ, sizeof(float) * JRQ);
            std::memcpy(to + JRQ, grads + (k * N + n) * JRQ, sizeof(float) * JRQ);
        }
    parallel_for(chunks.count, static_cast<int>(c.threads), [&](int64_t chunk) {
        const int64_t NKJ = N * rounds * J;
        Scratch scratch(2 * N * RP + 2 * PQ + 2 * NKJ + N * J + 2 * J + 2 * RQ + N + (COSINE ? N * JRQ : 0) +
                        (c.shared ? JPQ : 0));
        vf* x = scratch.vectors(N * RP);
        vf* dx = scratch.vectors(N * RP);
        vf* w = scratch.vectors(PQ);
        vf* own = scratch.vectors(PQ);
        vf* share = scratch.vectors(NKJ);
        vf* pull = scratch.vectors(NKJ);
        vf* inverse = scratch.vectors(N * J);
        vf* prior = scratch.vectors(J);
        vf* dp = scratch.vectors(J);
        vf* du = scratch.vectors(RQ);
        vf* direction = scratch.vectors(RQ);
        vf* take = scratch.vectors(N);
        vf* votes = scratch.vectors(COSINE ? N * JRQ : 0);
        vf* all = scratch.vectors(c.shared ? JPQ : 0);
        if (c.shared)
            for (int64_t e = 0; e < JPQ; ++e) all[e] = vf{};
        for (int64_t block = chunk * chunks.length; block < std::min((chunk + 1) * chunks.length, blocks); ++block) {
            const Children some(c, block);
            some.load_poses(c, x);
            some.load_prior(c, prior);
            for (int j = 0; j < J; ++j) {
                some.load_weight(c, j, w);
                for (int64_t n = 0; n < N; ++n) {
                    const auto group_of = [&](auto group, int k) __attribute__((always_inline)) {
                        rounds_of_vote<S, COSINE, decltype(group)::value>(
                            shape, x + n * RP, w, interleaved.floats() + (n * rounds + k) * 2 * JRQ + j * RQ, 2 * JRQ, JRQ,
                            share + (n * rounds + k) * J + j, pull + (n * rounds + k) * J + j, J,
                            votes + (COSINE ? n * JRQ + j * RQ : 0), inverse + n * J + j);
                    };
                    if constexpr (ROUNDS > 0) {
                        group_of(std::integral_constant<int, ROUNDS>{}, 0);
                    } else {
                        int k = 0;
                        for (; k + 2 <= rounds; k += 2) group_of(std::integral_constant<int, 2>{}, k);
                        if (k < rounds) group_of(std::integral_constant<int, 1>{}, k);
                    }
                }
            }
            for (int j = 0; j < J; ++j) dp[j] = vf{};
            for (int64_t n = 0; n < N; ++n) {
                take[n] = some.mask(c, n);
                for (int k = 0; k < rounds; ++k) {
                    vf *b = share + (n * rounds + k) * J, *g = pull + (n * rounds + k) * J;
                    if (c.prior != nullptr)
                        for (int j = 0; j < J; ++j) b[j] += prior[j];
                    softmax(b, J, c.leaky);
                    softmax_backward(b, g, J);
                    for (int j = 0; j < J; ++j) {
                        b[j] *= take[n];
                        g[j] *= take[n];
                        dp[j] += g[j];
                    }
                }
            }
            for (int64_t e = 0; e < N * RP; ++e) dx[e] = vf{};
            for (int j = 0; j < J; ++j) {
                some.load_weight(c, j, w);
                vf* dw = c.shared ? all + int64_t{j} * PQ : own;
                if (!c.shared)
                    for (int e = 0; e < PQ; ++e) dw[e] = vf{};
                for (int64_t n = 0; n < N; ++n) {
                    const float* state = interleaved.floats() + n * rounds * 2 * JRQ + j * RQ;
                    const vf *c_n = share + n * rounds * J + j, *d_n = pull + n * rounds * J + j;
                    if constexpr (COSINE)
                        direction_gradient(state, 2 * JRQ, rounds, d_n, J, votes + n * JRQ + j * RQ, inverse[n * J + j], RQ,
                                           direction);
                    for (int e = 0; e < RQ; ++e) {
                        vf a = uniform != nullptr ? take[n] * uniform[n * JRQ + j * RQ + e] : vf{};
                        for (int k = 0; k < rounds; ++k) {
                            a += c_n[k * J] * state[(2 * k + 1) * JRQ + e];
                            if constexpr (!COSINE) a += d_n[k * J] * state[2 * k * JRQ + e];
                        }
                        if constexpr (COSINE) a += direction[e];
                        du[e] = a;
                    }
                    const vf* xn = x + n * RP;
                    vf* dxn = dx + n * RP;
                    for (int p = 0; p < P; ++p)
                        for (int r = 0; r < R; ++r) {
                            const vf xrp = xn[r * P + p];
                            vf a{}, b{};  // two sums side by side
                            int q = 0;
#pragma GCC unroll 8
                            for (; q + 2 <= Q; q += 2) {
                                const vf d0 = du[r * Q + q], d1 = du[r * Q + q + 1];
                                a += w[p * Q + q] * d0;
                                b += w[p * Q + q + 1] * d1;
                                dw[p * Q + q] += xrp * d0;
                                dw[p * Q + q + 1] += xrp * d1;
                            }
                            if (q < Q) {
                                a += w[p * Q + q] * du[r * Q + q];
                                dw[p * Q + q] += xrp * du[r * Q + q];
                            }
                            dxn[r * P + p] += a + b;
                        }
                }
                if (!c.shared) lanes_to_rows(dw, some.m, PQ, d_weight + (some.i * J + j) * PQ, JPQ);
            }
            for (int64_t n = 0; n < N; ++n) lanes_to_rows(dx + n * RP, some.m, RP, d_poses + (n * c.I + some.i) * RP, RP);
            if (d_prior != nullptr) lanes_to_rows(dp, some.m, J, d_prior + some.i * J, J);
        }
        if (c.shared) sum_lanes_each(all, JPQ, partial.floats() + chunk * JPQ);
    });
    if (c.shared)
        for (int64_t e = 0; e < JPQ; ++e) {
            float total = 0.0f;
            for (int64_t k = 0; k < chunks.count; ++k) total += partial.floats()[k * JPQ + e];
            d_weight[e] = total;
        }
}

// -------------------------------------------------------------------------------------------------- choosing a template

template <class Run>
void with_shape(const Problem& c, Run&& run) {
    const auto is = [&](int R, int P, int Q) { return c.R == R && c.P == P && c.Q == Q; };
    const int R = static_cast<int>(c.R), P = static_cast<int>(c.P), Q = static_cast<int>(c.Q);
    if (is(1, 8, 16)) run(Shape<1, 8, 16>{R, P, Q});
    else if (is(1, 8, 8)) run(Shape<1, 8, 8>{R, P, Q});
    else if (is(1, 16, 16)) run(Shape<1, 16, 16>{R, P, Q});
    else if (is(4, 4, 4)) run(Shape<4, 4, 4>{R, P, Q});
    else run(Shape<0, 0, 0>{R, P, Q});
}

template <bool BACKWARD>
void pass(const Problem& c, const float* state, const float* grad, float* out) {
    with_shape(c, [&](auto shape) {
        using S = decltype(shape);
        if (use_deep(c)) {
            if (c.cosine) deep_pass<S, true, BACKWARD>(c, shape, state, grad, out);
            else deep_pass<S, false, BACKWARD>(c, shape, state, grad, out);
        } else {
            if (c.cosine) wide_pass<S, true, BACKWARD>(c, shape, state, grad, out);
            else wide_pass<S, false, BACKWARD>(c, shape, state, grad, out);
        }
    });
}

void full(const Problem& c, int64_t K, const float* states, const float* grads, const float* uniform, float* d_poses,
          float* d_weight, float* d_prior) {
    const bool deep = use_deep(c);
    with_shape(c, [&](auto shape) {
        using S = decltype(shape);
        const auto run = [&](auto rounds) {
            constexpr int ROUNDS = decltype(rounds)::value;
            if (deep) deep_full<S, false, ROUNDS>(c, shape, K, states, grads, uniform, d_poses, d_weight, d_prior);
            else wide_full<S, false, ROUNDS>(c, shape, K, states, grads, uniform, d_poses, d_weight, d_prior);
        };
        if (c.cosine) {
            if (deep) deep_full<S, true, 0>(c, shape, K, states, grads, uniform, d_poses, d_weight, d_prior);
            else wide_full<S, true, 0>(c, shape, K, states, grads, uniform, d_poses, d_weight, d_prior);
            return;
        }
        if constexpr (S::fixed) {
            if (K == 1) return run(std::integral_constant<int, 1>{});
            if (K == 2) return run(std::integral_constant<int, 2>{});
            if (K == 3) return run(std::integral_constant<int, 3>{});
        }
        run(std::integral_constant<int, 0>{});
    });
}

}  // namespace
}  // namespace torchcaps

#define TC_GUARD(...)                       \
    try {                                   \
        __VA_ARGS__;                        \
        return 0;                           \
    } catch (const std::bad_alloc&) {       \
        return 1;                           \
    }

extern "C" {

int tc_connected_sum(const tc_connected* c, float* s) { TC_GUARD(torchcaps::pass<false>(*c, nullptr, nullptr, s)) }

int tc_connected_forward(const tc_connected* c, const float* state, float* s) {
    TC_GUARD(torchcaps::pass<false>(*c, state, nullptr, s))
}

int tc_connected_backward_state(const tc_connected* c, const float* state, const float* grad, float* d_state) {
    TC_GUARD(torchcaps::pass<true>(*c, state, grad, d_state))
}

int tc_connected_backward_full(const tc_connected* c, int64_t K, const float* states, const float* grads,
                               const float* uniform, float* d_poses, float* d_weight, float* d_prior) {
    TC_GUARD(torchcaps::full(*c, K, states, grads, uniform, d_poses, d_weight, d_prior))
}

int tc_lanes(void) { return torchcaps::LANES; }
int tc_version(void) { return 1; }
}
