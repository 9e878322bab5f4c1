// Convolutional capsules without unfolding: every window of the map is a parent set of its own, and reads its children in
// place. Lanes = parents; poses are scalars. Weights and states are turned once per call: [child or window][vector][entry].
//
// Sums over children belong to their window; gradients of poses and weights belong to the type of the child, whose owner
// walks the windows in order. Results are bitwise the same for every thread count.
#include <algorithm>
#include <new>
#include <vector>

#include "parallel.h"
#include "torchcaps_native.h"
#include "votes.h"

namespace torchcaps {
namespace {

using Problem = tc_map;

// Windows and children that wait for their softmax together: four in flight hide the latency of sums over lanes.
constexpr int WINDOWS = 2, PAIR = 2;

struct Sizes {
    int64_t kernel, children, windows, all_windows;  // windows of one map; of the batch
    int vectors;                                     // of parents
    explicit Sizes(const Problem& c)
        : kernel(c.kernel_h * c.kernel_w), children(c.C * kernel), windows(c.out_h * c.out_w), all_windows(c.N * windows),
          vectors(static_cast<int>(ceil_div(c.J, LANES))) {}
};

// Where the children (type, kernel row, kernel column) of a window lie, counted from its first place. A table, since a
// division for each child and window would cost a fifth of the pass.
class Places {
public:
    struct Place {
        int64_t row, column, offset;
    };
    explicit Places(const Problem& c) : c_(c), places_(static_cast<std::size_t>(c.C * c.kernel_h * c.kernel_w)) {
        std::size_t i = 0;
        for (int64_t type = 0; type < c.C; ++type)
            for (int64_t row = 0; row < c.kernel_h; ++row)
                for (int64_t column = 0; column < c.kernel_w; ++column)
                    places_[i++] = {row, column, (type * c.H + row) * c.W + column};
    }

    struct Window {
        int64_t top, left, first;  // `first` may lie outside of the map
    };
    Window window(int64_t index) const {
        const int64_t windows = c_.out_h * c_.out_w, n = index / windows, at = index % windows;
        const int64_t top = at / c_.out_w * c_.stride_h - c_.padding_h, left = at % c_.out_w * c_.stride_w - c_.padding_w;
        return {top, left, n * c_.C * c_.H * c_.W + top * c_.W + left};
    }

    // The pose of a child of a window; null where it is padding or masked.
    TC_INLINE const float* pose(const Window& window, int64_t child) const {
        const Place& place = places_[static_cast<std::size_t>(child)];
        const int64_t y = window.top + place.row, x = window.left + place.column, at = window.first + place.offset;
        if (y < 0 || y >= c_.H || x < 0 || x >= c_.W) return nullptr;
        if (c_.mask != nullptr && !c_.mask[at]) return nullptr;
        return c_.poses + at * c_.R * c_.P;
    }

private:
    const Problem& c_;
    std::vector<Place> places_;
};

// Rows [J][count] -> [vectors][count], lanes behind the last parent zero.
void turn_parents(const float* from, int J, int count, vf* to) {
    for (int j = 0; j < J; j += LANES)
        rows_to_lanes(from + int64_t{j} * count, count, std::min(LANES, J - j), count, to + int64_t{j} / LANES * count);
}

void turn_back(const vf* from, int J, int count, float* to) {
    for (int j = 0; j < J; j += LANES)
        lanes_to_rows(from + int64_t{j} / LANES * count, std::min(LANES, J - j), count, to + int64_t{j} * count, count);
}

void turn_all(const Problem& c, const float* from, int64_t items, int64_t count, vf* to, int64_t stride) {
    const int J = static_cast<int>(c.J), threads = static_cast<int>(c.threads);
    constexpr int64_t AT_ONCE = 64;
    parallel_for(ceil_div(items, AT_ONCE), threads, [&](int64_t task) {
        for (int64_t k = task * AT_ONCE; k < std::min(items, (task + 1) * AT_ONCE); ++k)
            turn_parents(from + k * c.J * count, J, static_cast<int>(count), to + k * stride);
    });
}

// What is added to the logits: the prior, and for lanes behind the last parent a number that leaves them no share.
class Bias {
public:
    bool needed;
    const vf* of(int64_t child) const { return start_ + child * stride_; }

    Bias(const Problem& c, const Sizes& z)
        : needed(c.prior != nullptr || c.J % LANES != 0), rows_(c.prior != nullptr ? z.children : 1),
          stride_(c.prior != nullptr ? z.vectors : 0), memory_(rows_ * z.vectors * LANES), start_(memory_.vectors()) {
        const int64_t width = int64_t{z.vectors} * LANES;
        for (int64_t i = 0; i < rows_; ++i)
            for (int64_t j = 0; j < width; ++j)
                memory_.floats()[i * width + j] = j >= c.J ? -1e30f : c.prior != nullptr ? c.prior[i * c.J + j] : 0.0f;
    }

private:
    int64_t rows_, stride_;
    Buffer memory_;
    const vf* start_;
};

template <int VECTORS>
TC_INLINE void softmax_lanes(vf* b, int vectors, bool leaky) {
    const int V = VECTORS ? VECTORS : vectors;
    vf top = b[0];
    for (int h = 1; h < V; ++h) top = max(top, b[h]);
    top = max_all(top);
    if (leaky) top = max(top, vf{});
    vf total{};
    for (int h = 0; h < V; ++h) {
        b[h] = exp_nonpositive(b[h] - top);
        total += b[h];
    }
    total = sum_all(total);
    if (leaky) total += exp_nonpositive(-top);
    const vf share = 1.0f / total;
    for (int h = 0; h < V; ++h) b[h] *= share;
}

template <int VECTORS>
TC_INLINE void softmax_lanes_backward(const vf* c, vf* g, int vectors) {
    const int V = VECTORS ? VECTORS : vectors;
    vf mean{};
    for (int h = 0; h < V; ++h) mean += c[h] * g[h];
    mean = sum_all(mean);
    for (int h = 0; h < V; ++h) g[h] = c[h] * (g[h] - mean);
}

template <class S, int VECTORS, bool COSINE, bool BACKWARD>
void walk(const Problem& c, const Sizes& z, const Places& places, const S shape, const vf* weight, const Bias& bias, const vf* state,
          const vf* grad, int64_t first, int windows, vf* out) {
    const int V = VECTORS ? VECTORS : z.vectors, RQ = shape.RQ(), PQ = shape.PQ(), VRQ = V * RQ;
    constexpr int SLOTS = WINDOWS * PAIR;
    Scratch scratch(SLOTS * int64_t{VRQ} + WINDOWS * int64_t{VRQ} + 3 * SLOTS * V);
    vf* votes = scratch.vectors(SLOTS * int64_t{VRQ});  // [window][child of the pair][V][RQ]
    vf* sum = scratch.vectors(WINDOWS * int64_t{VRQ});
    vf* share = scratch.vectors(SLOTS * V);
    vf* pull = scratch.vectors(SLOTS * V);
    vf* inverse = scratch.vectors(SLOTS * V);
    for (int e = 0; e < windows * VRQ; ++e) out[e] = vf{};
    for (int e = 0; e < WINDOWS * VRQ; ++e) sum[e] = vf{};
    Places::Window window[WINDOWS];
    for (int k = 0; k < windows; ++k) window[k] = places.window(first + k);

    int64_t waiting = 0;
    for (int64_t i = 0; i < z.children; i += PAIR) {
        bool any = false, there[SLOTS];
        for (int k = 0; k < WINDOWS; ++k)
            for (int t = 0; t < PAIR; ++t) {
                const int slot = k * PAIR + t;
                const float* x = k < windows && i + t < z.children ? places.pose(window[k], i + t) : nullptr;
                there[slot] = x != nullptr;
                any |= there[slot];
                vf *v = votes + int64_t{slot} * VRQ, *b = share + slot * V;
                if (x == nullptr) {
                    for (int e = 0; e < VRQ; ++e) v[e] = vf{};
                    for (int h = 0; h < V; ++h) b[h] = pull[slot * V + h] = inverse[slot * V + h] = vf{};
                    continue;
                }
                const vf* w = weight + (i + t) * V * PQ;
                const vf* sk = state + int64_t{k} * VRQ;
                const vf* gk = BACKWARD ? grad + int64_t{k} * VRQ : nullptr;
                for (int h = 0; h < V; ++h) {
                    vf agreement{}, drag{}, squares{};
                    each_vote(shape, x, w + h * PQ, [&](int e, vf u) __attribute__((always_inline)) {
                        v[h * RQ + e] = u;
                        agreement += u * sk[h * RQ + e];
                        if constexpr (BACKWARD) drag += u * gk[h * RQ + e];
                        if constexpr (COSINE) squares += u * u;
                    });
                    if constexpr (COSINE) {
                        inverse[slot * V + h] = inverse_norm(squares, v + h * RQ, RQ);
                        agreement *= inverse[slot * V + h];
                    }
                    b[h] = bias.needed ? agreement + bias.of(i + t)[h] : agreement;
                    if constexpr (BACKWARD) pull[slot * V + h] = drag;
                }
            }
        if (!any) continue;
#pragma GCC unroll 4
        for (int slot = 0; slot < SLOTS; ++slot) softmax_lanes<VECTORS>(share + slot * V, V, c.leaky);
        if constexpr (BACKWARD) {
#pragma GCC unroll 4
            for (int slot = 0; slot < SLOTS; ++slot) {
                softmax_lanes_backward<VECTORS>(share + slot * V, pull + slot * V, V);
                for (int h = 0; h < V; ++h)
                    share[slot * V + h] = COSINE ? pull[slot * V + h] * inverse[slot * V + h] : pull[slot * V + h];
            }
        }
        for (int k = 0; k < windows; ++k) {
            const int slot = k * PAIR;
            if (!there[slot] && !there[slot + 1]) continue;
            for (int h = 0; h < V; ++h) {
                const vf c0 = share[slot * V + h], c1 = share[(slot + 1) * V + h];
                const vf *v0 = votes + int64_t{slot} * VRQ + h * RQ, *v1 = v0 + VRQ;
                vf* to = sum + int64_t{k} * VRQ + h * RQ;
#pragma GCC unroll 4
                for (int e = 0; e < RQ; ++e) to[e] += c0 * v0[e] + c1 * v1[e];
            }
        }
        waiting += PAIR;
        if (waiting >= SUM_BLOCK) {
            for (int e = 0; e < windows * VRQ; ++e) {
                out[e] += sum[e];
                sum[e] = vf{};
            }
            waiting = 0;
        }
    }
    for (int e = 0; e < windows * VRQ; ++e) out[e] += sum[e];
}

// out = sum_i u_ij of one window
template <class S, int VECTORS>
void walk_sum(const Sizes& z, const Places& places, const S shape, const vf* weight, int64_t index, vf* out) {
    const int V = VECTORS ? VECTORS : z.vectors, RQ = shape.RQ(), PQ = shape.PQ();
    const Places::Window window = places.window(index);
    for (int h = 0; h < V; ++h) {
        vf local[S::fixed ? shape.RQ() : 1];
        Scratch scratch(RQ);
        vf *sum = S::fixed ? local : scratch.vectors(RQ), *to = out + h * RQ;
        for (int e = 0; e < RQ; ++e) sum[e] = to[e] = vf{};
        for (int64_t i = 0; i < z.children; ++i) {
            const float* x = places.pose(window, i);
            if (x != nullptr)
                each_vote(shape, x, weight + (i * V + h) * PQ, [&](int e, vf u) __attribute__((always_inline)) { sum[e] += u; });
            if (i % SUM_BLOCK == SUM_BLOCK - 1 || i + 1 == z.children)
                for (int e = 0; e < RQ; ++e) {
                    to[e] += sum[e];
                    sum[e] = vf{};
                }
        }
    }
}

// state null: the plain sum of votes
template <class S, int VECTORS, bool COSINE, bool BACKWARD>
void pass(const Problem& c, const S shape, const float* state, const float* grad, float* out) {
    const Sizes z(c);
    const int RQ = shape.RQ(), PQ = shape.PQ(), J = static_cast<int>(c.J);
    const int64_t VRQ = int64_t{z.vectors} * RQ, VPQ = int64_t{z.vectors} * PQ, JRQ = c.J * RQ;
    Buffer weight(z.children * VPQ * LANES);
    turn_all(c, c.weight, z.children, PQ, weight.vectors(), VPQ);
    const Bias bias(c, z);
    const Places places(c);
    parallel_for(ceil_div(z.all_windows, WINDOWS), static_cast<int>(c.threads), [&](int64_t task) {
        const int64_t first = task * WINDOWS;
        const int windows = static_cast<int>(std::min<int64_t>(WINDOWS, z.all_windows - first));
        Buffer turned(3 * WINDOWS * VRQ * LANES);
        vf *states = turned.vectors(), *grads = states + WINDOWS * VRQ, *sums = grads + WINDOWS * VRQ;
        for (int k = 0; k < windows; ++k) {
            if (state == nullptr) {
                walk_sum<S, VECTORS>(z, places, shape, weight.vectors(), first + k, sums + k * VRQ);
                continue;
            }
            turn_parents(state + (first + k) * JRQ, J, RQ, states + k * VRQ);
            if (BACKWARD) turn_parents(grad + (first + k) * JRQ, J, RQ, grads + k * VRQ);
        }
        if (state != nullptr)
            walk<S, VECTORS, COSINE, BACKWARD>(c, z, places, shape, weight.vectors(), bias, states, grads, first, windows, sums);
        for (int k = 0; k < windows; ++k) turn_back(sums + k * VRQ, J, RQ, out + (first + k) * JRQ);
    });
}

template <class S, int VECTORS, bool COSINE, int ROUNDS>
void full(const Problem& c, const S shape, int64_t K, const float* states, const float* grads, const float* uniform,
          float* d_poses, float* d_weight, float* d_prior) {
    const Sizes z(c);
    const int rounds = ROUNDS ? ROUNDS : static_cast<int>(K), V = VECTORS ? VECTORS : z.vectors;
    const int R = shape.R(), P = shape.P(), Q = shape.Q(), RP = shape.RP(), RQ = shape.RQ(), PQ = shape.PQ();
    const int64_t VRQ = int64_t{V} * RQ, VPQ = int64_t{V} * PQ, JRQ = c.J * RQ;
    // [window][round][state, grad][V][RQ], then uniform
    const int64_t per_window = (2 * rounds + 1) * VRQ;
    Buffer weight(z.children * VPQ * LANES), packed(z.all_windows * per_window * LANES);
    turn_all(c, c.weight, z.children, PQ, weight.vectors(), VPQ);
    for (int k = 0; k < rounds; ++k) {
        turn_all(c, states + k * z.all_windows * JRQ, z.all_windows, RQ, packed.vectors() + 2 * k * VRQ, per_window);
        turn_all(c, grads + k * z.all_windows * JRQ, z.all_windows, RQ, packed.vectors() + (2 * k + 1) * VRQ, per_window);
    }
    if (uniform != nullptr) turn_all(c, uniform, z.all_windows, RQ, packed.vectors() + 2 * rounds * VRQ, per_window);
    const Bias bias(c, z);
    const Places places(c);

    parallel_for(c.C, static_cast<int>(c.threads), [&](int64_t type) {
        Scratch scratch(2 * z.kernel * VPQ + z.kernel * V + (2 * int64_t{rounds} + 2) * V + RP + 2 * RQ + (COSINE ? VRQ : 0) +
                        ceil_div(RP, LANES));
        vf* dw = scratch.vectors(z.kernel * VPQ);
        vf* dw_total = scratch.vectors(z.kernel * VPQ);
        vf* dp = scratch.vectors(z.kernel * V);
        vf* share = scratch.vectors(int64_t{rounds} * V);
        vf* pull = scratch.vectors(int64_t{rounds} * V);
        vf* inverse = scratch.vectors(V);
        vf* dx = scratch.vectors(RP);
        vf* du = scratch.vectors(RQ);
        vf* direction = scratch.vectors(RQ);
        vf* votes = scratch.vectors(COSINE ? VRQ : 0);
        float* dx_sum = reinterpret_cast<float*>(scratch.vectors(ceil_div(RP, LANES)));
        for (int64_t e = 0; e < z.kernel * VPQ; ++e) dw[e] = dw_total[e] = vf{};
        for (int64_t e = 0; e < z.kernel * V; ++e) dp[e] = vf{};
        for (int64_t n = 0; n < c.N; ++n) {
            float* own = d_poses + (n * c.C + type) * c.H * c.W * RP;
            std::fill(own, own + c.H * c.W * RP, 0.0f);
        }
        for (int64_t window = 0; window < z.all_windows; ++window) {
            const Places::Window here = places.window(window);
            const vf *state = packed.vectors() + window * per_window, *flat = state + 2 * rounds * VRQ;
            for (int64_t place = 0; place < z.kernel; ++place) {
                const int64_t i = type * z.kernel + place;
                const float* x = places.pose(here, i);
                if (x == nullptr) continue;
                const vf* w = weight.vectors() + i * VPQ;
                vf* dwi = dw + place * VPQ;
                for (int h = 0; h < V; ++h) {
                    const auto some = [&](auto group, int k) __attribute__((always_inline)) {
                        constexpr int GROUP = decltype(group)::value;
                        const vf* s = state + 2 * k * VRQ + h * RQ;
                        vf agreement[GROUP], drag[GROUP], squares{};
#pragma GCC unroll 4
                        for (int g = 0; g < GROUP; ++g) agreement[g] = drag[g] = vf{};
                        each_vote(shape, x, w + h * PQ, [&](int e, vf u) __attribute__((always_inline)) {
                            if constexpr (COSINE) {
                                votes[h * RQ + e] = u;
                                squares += u * u;
                            }
#pragma GCC unroll 4
                            for (int g = 0; g < GROUP; ++g) {
                                agreement[g] += u * s[2 * g * VRQ + e];
                                drag[g] += u * s[(2 * g + 1) * VRQ + e];
                            }
                        });
                        if constexpr (COSINE) inverse[h] = inverse_norm(squares, votes + h * RQ, RQ);
                        for (int g = 0; g < GROUP; ++g) {
                            vf b = COSINE ? agreement[g] * inverse[h] : agreement[g];
                            if (bias.needed) b += bias.of(i)[h];
                            share[(k + g) * V + h] = b;
                            pull[(k + g) * V + h] = drag[g];
                        }
                    };
                    if constexpr (ROUNDS > 0) {
                        some(std::integral_constant<int, ROUNDS>{}, 0);
                    } else {
                        int k = 0;
                        for (; k + 2 <= rounds; k += 2) some(std::integral_constant<int, 2>{}, k);
                        if (k < rounds) some(std::integral_constant<int, 1>{}, k);
                    }
                }
#pragma GCC unroll 4
                for (int k = 0; k < rounds; ++k) {
                    softmax_lanes<VECTORS>(share + k * V, V, c.leaky);
                    softmax_lanes_backward<VECTORS>(share + k * V, pull + k * V, V);
                }
                if (d_prior != nullptr)
                    for (int k = 0; k < rounds; ++k)
                        for (int h = 0; h < V; ++h) dp[place * V + h] += pull[k * V + h];
                vf grad_x[S::fixed ? shape.RP() : 1];
                vf* dxi = S::fixed ? grad_x : dx;
                for (int e = 0; e < RP; ++e) dxi[e] = vf{};
                for (int h = 0; h < V; ++h) {
                    vf cj[ROUNDS ? ROUNDS : 1], dj[ROUNDS ? ROUNDS : 1];
                    if constexpr (COSINE)
                        direction_gradient(state + h * RQ, 2 * VRQ, rounds, pull + h, V, votes + h * RQ, inverse[h], RQ,
                                           direction);
                    if constexpr (ROUNDS > 0) {
#pragma GCC unroll 4
                        for (int k = 0; k < ROUNDS; ++k) {
                            cj[k] = share[k * V + h];
                            dj[k] = pull[k * V + h];
                        }
                    }
                    const auto gradient = [&](int e) __attribute__((always_inline)) {
                        const int64_t entry = h * RQ + e;
                        vf a = uniform != nullptr ? flat[entry] : vf{};
                        if constexpr (ROUNDS > 0) {
#pragma GCC unroll 4
                            for (int k = 0; k < ROUNDS; ++k) {
                                a += cj[k] * state[(2 * k + 1) * VRQ + entry];
                                a += dj[k] * state[2 * k * VRQ + entry];
                            }
                        } else {
                            for (int k = 0; k < rounds; ++k) {
                                a += share[k * V + h] * state[(2 * k + 1) * VRQ + entry];
                                if constexpr (!COSINE) a += pull[k * V + h] * state[2 * k * VRQ + entry];
                            }
                        }
                        if constexpr (COSINE) a += direction[e];
                        return a;
                    };
                    const vf* wh = w + h * PQ;
                    vf* dwh = dwi + h * PQ;
                    if constexpr (S::fixed) {
#pragma GCC unroll 4
                        for (int q = 0; q < Q; ++q) {
                            vf column[shape.R()];
#pragma GCC unroll 4
                            for (int r = 0; r < R; ++r) column[r] = gradient(r * Q + q);
#pragma GCC unroll 16
                            for (int p = 0; p < P; ++p) {
                                const vf weight_pq = wh[p * Q + q];
                                vf total = dwh[p * Q + q];
#pragma GCC unroll 4
                                for (int r = 0; r < R; ++r) {
                                    dxi[r * P + p] += column[r] * weight_pq;
                                    total += x[r * P + p] * column[r];
                                }
                                dwh[p * Q + q] = total;
                            }
                        }
                    } else {
                        for (int e = 0; e < RQ; ++e) du[e] = gradient(e);
                        for (int r = 0; r < R; ++r)
                            for (int p = 0; p < P; ++p) {
                                vf a = dxi[r * P + p];
                                const float xp = x[r * P + p];
                                for (int q = 0; q < Q; ++q) {
                                    a += wh[p * Q + q] * du[r * Q + q];
                                    dwh[p * Q + q] += xp * du[r * Q + q];
                                }
                                dxi[r * P + p] = a;
                            }
                    }
                }
                sum_lanes_each(dxi, RP, dx_sum);
                float* to = d_poses + (x - c.poses);
                for (int e = 0; e < RP; ++e) to[e] += dx_sum[e];
            }
            if (window % SUM_BLOCK == SUM_BLOCK - 1 || window + 1 == z.all_windows)
                for (int64_t e = 0; e < z.kernel * VPQ; ++e) {
                    dw_total[e] += dw[e];
                    dw[e] = vf{};
                }
        }
        for (int64_t place = 0; place < z.kernel; ++place) {
            const int64_t i = type * z.kernel + place;
            turn_back(dw_total + place * VPQ, static_cast<int>(c.J), PQ, d_weight + i * c.J * PQ);
            if (d_prior != nullptr)
                std::memcpy(d_prior + i * c.J, dp + place * V, sizeof(float) * static_cast<std::size_t>(c.J));
        }
    });
}

template <class Run>
void with_shape(const Problem& c, Run&& run) {
    const auto is = [&](int R, int P, int Q) { return c.R == R && c.P == P && c.Q == Q; };
    const int R = static_cast<int>(c.R), P = static_cast<int>(c.P), Q = static_cast<int>(c.Q);
    const int64_t vectors = ceil_div(c.J, LANES);
    const auto with_vectors = [&](auto shape) {
        if (vectors == 1) run(shape, std::integral_constant<int, 1>{});
        else if (vectors == 2) run(shape, std::integral_constant<int, 2>{});
        else run(shape, std::integral_constant<int, 0>{});
    };
    if (is(4, 4, 4)) with_vectors(Shape<4, 4, 4>{R, P, Q});
    else if (is(1, 8, 16)) run(Shape<1, 8, 16>{R, P, Q}, std::integral_constant<int, 0>{});
    else run(Shape<0, 0, 0>{R, P, Q}, std::integral_constant<int, 0>{});
}

template <bool BACKWARD>
void any_pass(const Problem& c, const float* state, const float* grad, float* out) {
    with_shape(c, [&](auto shape, auto vectors) {
        using S = decltype(shape);
        constexpr int V = decltype(vectors)::value;
        if (c.cosine) pass<S, V, true, BACKWARD>(c, shape, state, grad, out);
        else pass<S, V, false, BACKWARD>(c, shape, state, grad, out);
    });
}

void any_full(const Problem& c, int64_t K, const float* states, const float* grads, const float* uniform, float* d_poses,
              float* d_weight, float* d_prior) {
    with_shape(c, [&](auto shape, auto vectors) {
        using S = decltype(shape);
        constexpr int V = decltype(vectors)::value;
        const auto run = [&](auto cosine, auto rounds) {
            full<S, V, decltype(cosine)::value, decltype(rounds)::value>(c, shape, K, states, grads, uniform, d_poses, d_weight,
                                                                         d_prior);
        };
        if (c.cosine) return run(std::true_type{}, std::integral_constant<int, 0>{});
        if constexpr (S::fixed) {
            if (K == 1) return run(std::false_type{}, std::integral_constant<int, 1>{});
            if (K == 2) return run(std::false_type{}, std::integral_constant<int, 2>{});
        }
        run(std::false_type{}, std::integral_constant<int, 0>{});
    });
}

}  // namespace
}  // namespace torchcaps

extern "C" {

int tc_map_sum(const tc_map* c, float* s) {
    try {
        torchcaps::any_pass<false>(*c, nullptr, nullptr, s);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

int tc_map_forward(const tc_map* c, const float* state, float* s) {
    try {
        torchcaps::any_pass<false>(*c, state, nullptr, s);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

int tc_map_backward_state(const tc_map* c, const float* state, const float* grad, float* d_state) {
    try {
        torchcaps::any_pass<true>(*c, state, grad, d_state);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

int tc_map_backward_full(const tc_map* c, int64_t K, const float* states, const float* grads, const float* uniform,
                         float* d_poses, float* d_weight, float* d_prior) {
    try {
        torchcaps::any_full(*c, K, states, grads, uniform, d_poses, d_weight, d_prior);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
}
