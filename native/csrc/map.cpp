// Convolutional capsules without unfolding: every window of the map has parents of its own, and reads its children in place.
// Lanes = parents; poses are scalars. Weights and parents are turned once per call: [child or window][vector][entry].
//
// Sums over children belong to their window; gradients of poses and weights belong to the type of the child, whose owner
// walks the windows in order. Results are bitwise the same for every thread count.
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "votes.h"

namespace torchcaps {
namespace {

struct Map {
    const tc_map& c;
    const int J = static_cast<int>(c.J), V = static_cast<int>(ceil_div(c.J, LANES));  // parents, and vectors of them
    const int threads = static_cast<int>(c.threads);
    const int64_t kernel = c.kernel_h * c.kernel_w, children = c.C * kernel;
    const int64_t windows = c.N * c.out_h * c.out_w, RP = c.R * c.P;

    // Rows [J][count] -> [V][count], lanes behind the last parent zero; and back.
    void turn(const float* from, int count, vf* to) const {
        for (int j = 0; j < J; j += LANES)
            rows_to_lanes(from + int64_t{j} * count, count, std::min(LANES, J - j), count, to + int64_t{j} / LANES * count);
    }
    void turn_back(const vf* from, int count, float* to) const {
        for (int j = 0; j < J; j += LANES)
            lanes_to_rows(from + int64_t{j} / LANES * count, std::min(LANES, J - j), count, to + int64_t{j} * count, count);
    }
    void turn_all(const float* from, int64_t items, int count, vf* to, int64_t step) const {
        constexpr int64_t AT_ONCE = 64;
        parallel_for(ceil_div(items, AT_ONCE), threads, [&](int64_t task) {
            for (int64_t k = task * AT_ONCE; k < std::min(items, (task + 1) * AT_ONCE); ++k) turn(from + k * J * count, count, to + k * step);
        });
    }
};

// Where the children (type, kernel row, kernel column) of a window lie, counted from its first place. A table, since a
// division for each child and window would cost a fifth of the pass.
class Places {
public:
    explicit Places(const Map& map) : c_(map.c), RP_(map.RP), places_(static_cast<std::size_t>(map.children)),
          zeros_(static_cast<std::size_t>(map.RP)) {
        std::size_t i = 0;
        for (int64_t type = 0; type < c_.C; ++type)
            for (int64_t row = 0; row < c_.kernel_h; ++row)
                for (int64_t column = 0; column < c_.kernel_w; ++column)
                    places_[i++] = {row, column, (type * c_.H + row) * c_.W + column};
    }

    struct Window {
        int64_t top, left, first;  // `first` may lie outside of the map
    };
    Window window(int64_t index) const {
        const int64_t each = c_.out_h * c_.out_w, n = index / each, at = index % each;
        const int64_t top = at / c_.out_w * c_.stride_h - c_.padding_h, left = at % c_.out_w * c_.stride_w - c_.padding_w;
        return {top, left, n * c_.C * c_.H * c_.W + top * c_.W + left};
    }

    // The pose of a child of a window; where that is padding, or there is no such child, zeros.
    TC_INLINE const float* pose(const Window& window, int64_t child) const {
        const int64_t from = child < static_cast<int64_t>(places_.size()) ? place(window, child) : -1;
        return from < 0 ? zeros_.data() : c_.poses + from;
    }

    const float* zeros() const { return zeros_.data(); }

    // [children][WINDOWS] from window `first` on, and some zeros behind: windows too many are the last once more
    template <int WINDOWS>
    std::vector<const float*> poses(int64_t first) const {
        std::vector<const float*> x((places_.size() + 6) * WINDOWS, zeros());
        for (int n = 0; n < WINDOWS; ++n) {
            const Window here = window(std::min(first + n, c_.N * c_.out_h * c_.out_w - 1));
            for (std::size_t i = 0; i < places_.size(); ++i) x[i * WINDOWS + n] = pose(here, static_cast<int64_t>(i));
        }
        return x;
    }

    // Where that pose lies in the map, or -1.
    TC_INLINE int64_t place(const Window& window, int64_t child) const {
        const Place& place = places_[static_cast<std::size_t>(child)];
        const int64_t y = window.top + place.row, x = window.left + place.column;
        if (y < 0 || y >= c_.H || x < 0 || x >= c_.W) return -1;
        return (window.first + place.offset) * RP_;
    }

private:
    struct Place {
        int64_t row, column, offset;
    };
    const tc_map& c_;
    const int64_t RP_;
    std::vector<Place> places_;
    std::vector<float> zeros_;
};

// What is added to the logits of a child, [V]: the prior, and for lanes behind the last parent a number that leaves them no
// share. Null where nothing is.
class Bias {
public:
    explicit Bias(const Map& map) : V_(map.V), step_(map.c.prior != nullptr ? map.V : 0), needed_(map.c.prior != nullptr || map.J % LANES != 0),
          memory_((map.c.prior != nullptr ? map.children : 1) * map.V * LANES) {
        const int64_t width = int64_t{V_} * LANES, rows = step_ != 0 ? map.children : 1;
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < width; ++j)
                memory_.floats()[i * width + j] = j >= map.J ? -1e30f : step_ != 0 ? map.c.prior[i * map.J + j] : 0.0f;
    }
    const vf* of(int64_t child) const { return needed_ ? memory_.vectors() + child * step_ : nullptr; }

private:
    const int V_, step_;
    const bool needed_;
    mutable Buffer memory_;
};

// ITEMS pairs of products g and logits b, [V] each, become couplings: b becomes c; or, with g, b becomes d and g becomes c.
// Side by side, to hide the latency of sums over lanes.
template <int ITEMS, int VECTORS>
TC_INLINE void couple_items(bool leaky, bool backward, int vectors, vf* b, vf* g, int64_t step) {
    const int V = VECTORS != 0 ? VECTORS : vectors;
    vf top[ITEMS], total[ITEMS], mean[ITEMS];
#pragma GCC unroll 4
    for (int i = 0; i < ITEMS; ++i) {
        top[i] = leaky ? vf{} : b[i * step];
        for (int h = 0; h < V; ++h) top[i] = max(top[i], b[i * step + h]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < ITEMS; ++i) {
        top[i] = max_all(top[i]);
        total[i] = mean[i] = vf{};
    }
    for (int h = 0; h < V; ++h)
#pragma GCC unroll 4
        for (int i = 0; i < ITEMS; ++i) {
            const vf e = exp_nonpositive(b[i * step + h] - top[i]);
            b[i * step + h] = e;
            total[i] += e;
            if (backward) mean[i] += e * g[i * step + h];
        }
#pragma GCC unroll 4
    for (int i = 0; i < ITEMS; ++i) {
        total[i] = sum_all(total[i]);
        if (backward) mean[i] = sum_all(mean[i]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < ITEMS; ++i) {
        if (leaky) total[i] += exp_nonpositive(-top[i]);
        const vf share = 1.0f / total[i];
        for (int h = 0; h < V; ++h) b[i * step + h] *= share;
        if (backward) softmax_backward(b + i * step, g + i * step, V, mean[i] * share);
    }
}

template <int VECTORS>
__attribute__((noinline)) void couple_all(bool leaky, int vectors, int count, int pair, vf* slots) {
    const int64_t step = int64_t{pair} * vectors;
    vf *g = slots, *b = slots + (pair - 1) * vectors;
    int i = 0;
    for (; i + 4 <= count; i += 4) couple_items<4, VECTORS>(leaky, pair == 2, vectors, b + i * step, g + i * step, step);
    for (; i + 2 <= count; i += 2) couple_items<2, VECTORS>(leaky, pair == 2, vectors, b + i * step, g + i * step, step);
    if (i < count) couple_items<1, VECTORS>(leaky, pair == 2, vectors, b + i * step, g + i * step, step);
}

// Slots [items][targets][V]: as `couple` of fully connected capsules. Inverse [items][V].
inline void couple_lanes(bool leaky, int V, int items, int targets, vf* slots, const vf* const* bias, const vf* inverse) {
    const int pair = std::min(targets, 2);
    for (int i = 0; i < items; ++i)
        for (int t = pair - 1; t < targets; t += pair)
            for (int h = 0; h < V; ++h) {
                vf& b = slots[(i * targets + t) * V + h];
                if (inverse != nullptr) b *= inverse[i * V + h];
                if (bias[i] != nullptr) b += bias[i][h];
            }
    const int count = items * (targets / pair);
    if (V == 1) couple_all<1>(leaky, 1, count, pair, slots);
    else if (V == 2) couple_all<2>(leaky, 2, count, pair, slots);
    else couple_all<0>(leaky, V, count, pair, slots);
}

// ------------------------------------------------------------------------------------------------------ sums over children

constexpr int WINDOWS = 2;  // windows that share every look at the weights; each lets two children share one at its parents

// Votes [child][V][window][RQ] of two children in WINDOWS windows from their poses [child][window][RP], and their slots
// [window][child][targets][V]; targets [window][target][V][RQ].
template <class Z>
__attribute__((noinline)) void votes_of_two(const Z z, int V, const float* const* x, const vf* w, int64_t w_next, int targets, const vf* target, vf* votes,
                                            vf* slots, vf* inverse) {
    const int64_t VRQ = int64_t{V} * z.RQ(), kept = int64_t{targets} * V;
    for (int h = 0; h < V; ++h) {
        vf* u = votes + h * WINDOWS * z.RQ();
        for (int k = 0; k < 2; ++k)
            for (int n = 0; n < WINDOWS; ++n)
                product_into(z.R, z.P, z.Q, Matrix<float>{x[k * WINDOWS + n], z.P, 1}, Matrix<vf>{w + k * w_next + h * z.PQ(), z.Q, 1},
                             u + k * WINDOWS * VRQ + n * z.RQ());
        for (int n = 0; n < WINDOWS; ++n) {
            dots<2>(targets, z.RQ(), List<const vf>{u + n * z.RQ(), WINDOWS * VRQ}, List<const vf>{target + n * targets * VRQ + h * z.RQ(), VRQ},
                    Slots{slots + n * 2 * kept + h, kept, V});
            for (int k = 0; inverse != nullptr && k < 2; ++k)
                inverse[(n * 2 + k) * V + h] = inverse_norm(u + n * z.RQ() + k * WINDOWS * VRQ, z.RQ());
        }
    }
}

// sum [window][V][RQ] += shares times votes of both children
template <class Z>
__attribute__((noinline)) void add_two(const Z z, int V, const vf* votes, const Slots shares, vf* sum) {
    for (int n = 0; n < WINDOWS; ++n)
        for (int h = 0; h < V; ++h) {
            const List<vf> to{sum + int64_t{n * V + h} * z.RQ(), 0};
            mix_of<1, 2>(z.RQ(), Slots{shares.data + n * shares.item + h, 0, shares.target},
                         List<const vf>{votes + (h * WINDOWS + n) * z.RQ(), int64_t{WINDOWS} * V * z.RQ()}, to, 1, to);
        }
}

template <class Z>
void walk(const Map& map, const Places& places, const Z z, const vf* weight, const Bias& bias, int targets, const vf* target, int64_t first, vf* out) {
    const int V = map.V;
    const int64_t VRQ = int64_t{V} * z.RQ(), VPQ = int64_t{V} * z.PQ(), kept = int64_t{targets} * V;
    const Scratch scratch({2 * WINDOWS * VRQ, 2 * WINDOWS * kept, 2 * WINDOWS * int64_t{V}, WINDOWS * VRQ});
    const auto [votes, slots, inverse, sum] = scratch.parts;
    std::fill(out, out + WINDOWS * VRQ, vf{});
    std::fill(sum, sum + WINDOWS * VRQ, vf{});
    const std::vector<const float*> x = places.poses<WINDOWS>(first);
    for (int64_t i = 0; i < map.children; i += 2) {
        const bool two = i + 1 < map.children;  // else the second has a pose of zeros
        const float* const* own = x.data() + i * WINDOWS;
        bool any = false;
        for (int s = 0; s < 2 * WINDOWS; ++s) {
            any |= own[s] != places.zeros();
            __builtin_prefetch(own[s + 4 * WINDOWS]);
        }
        if (any) {
            votes_of_two(z, V, own, weight + i * VPQ, two ? VPQ : 0, targets, target, votes, slots, map.c.cosine ? inverse : nullptr);
            const vf *b0 = bias.of(i), *b1 = bias.of(two ? i + 1 : i), *biases[2 * WINDOWS];
            for (int n = 0; n < WINDOWS; ++n) biases[2 * n] = b0, biases[2 * n + 1] = b1;
            couple_lanes(map.c.leaky, V, 2 * WINDOWS, targets, slots, biases, map.c.cosine ? inverse : nullptr);
            vf* shares = slots + (targets - 1) * V;
            for (int s = 0; map.c.cosine && targets == 2 && s < 2 * WINDOWS; ++s)
                for (int h = 0; h < V; ++h) shares[s * kept + h] *= inverse[s * V + h];
            add_two(z, V, votes, Slots{shares, 2 * kept, kept}, sum);
        }
        if ((i + 2) % SUM_BLOCK == 0 || i + 2 >= map.children) flush(sum, out, WINDOWS * VRQ);
    }
}

constexpr int SUM_WINDOWS = 4, SUM_CHILDREN = 8;  // of one product of the plain sum

template <class Z>
void walk_sum(const Map& map, const Places& places, const Z z, const vf* weight, int64_t first, vf* out) {
    const int V = map.V, RP = z.RP();
    const int64_t VRQ = int64_t{V} * z.RQ(), VPQ = int64_t{V} * z.PQ();
    const Scratch scratch({ceil_div(SUM_WINDOWS * SUM_CHILDREN * RP, LANES), SUM_WINDOWS * VRQ, SUM_WINDOWS * VRQ});
    const auto [poses, sum, total] = scratch.parts;  // sums [V][window][RQ]
    float* x = reinterpret_cast<float*>(poses);
    std::fill(sum, sum + SUM_WINDOWS * VRQ, vf{});
    std::fill(total, total + SUM_WINDOWS * VRQ, vf{});
    Places::Window window[SUM_WINDOWS];
    for (int n = 0; n < SUM_WINDOWS; ++n) window[n] = places.window(std::min(first + n, map.windows - 1));
    for (int64_t i = 0; i < map.children; i += SUM_CHILDREN) {
        const int many = static_cast<int>(std::min<int64_t>(SUM_CHILDREN, map.children - i));
        for (int t = 0; t < many; ++t)
            for (int n = 0; n < SUM_WINDOWS; ++n) {
                const float* from = places.pose(window[n], i + t);
                std::copy(from, from + RP, x + (t * SUM_WINDOWS + n) * RP);
            }
        for (int h = 0; h < V; ++h)
            product_onto(SUM_WINDOWS * z.R, z.P, z.Q, Matrix<float>{x, z.P, 1, SUM_WINDOWS * RP}, Matrix<vf>{weight + i * VPQ + h * z.PQ(), z.Q, 1, VPQ},
                         sum + h * SUM_WINDOWS * z.RQ(), many);
        if ((i + SUM_CHILDREN) % SUM_BLOCK == 0 || i + SUM_CHILDREN >= map.children) flush(sum, total, SUM_WINDOWS * VRQ);
    }
    for (int n = 0; n < SUM_WINDOWS; ++n)
        for (int h = 0; h < V; ++h)
            std::copy(total + (h * SUM_WINDOWS + n) * z.RQ(), total + (h * SUM_WINDOWS + n + 1) * z.RQ(), out + n * VRQ + h * z.RQ());
}

template <class Z>
void pass(const Map& map, const Z z, const float* state, const float* grad, float* out) {
    const int RQ = z.RQ(), targets = (state != nullptr) + (grad != nullptr), at_once = targets == 0 ? SUM_WINDOWS : WINDOWS;
    const int64_t VRQ = int64_t{map.V} * RQ, VPQ = int64_t{map.V} * z.PQ(), JRQ = map.c.J * RQ;
    Buffer weight(map.children * VPQ * LANES);
    map.turn_all(map.c.weight, map.children, z.PQ(), weight.vectors(), VPQ);
    const Bias bias(map);
    const Places places(map);
    parallel_for(ceil_div(map.windows, at_once), map.threads, [&](int64_t task) {
        const int64_t first = task * at_once;
        Buffer turned((targets + 1) * at_once * VRQ * LANES);
        vf *target = turned.vectors(), *sums = target + targets * at_once * VRQ;
        for (int n = 0; targets > 0 && n < at_once; ++n) {
            const int64_t from = std::min(first + n, map.windows - 1) * JRQ;  // a window too many is the last once more
            if (grad != nullptr) map.turn(grad + from, RQ, target + n * targets * VRQ);
            map.turn(state + from, RQ, target + (n * targets + targets - 1) * VRQ);
        }
        if (targets == 0) walk_sum(map, places, z, weight.vectors(), first, sums);
        else walk(map, places, z, weight.vectors(), bias, targets, target, first, sums);
        for (int n = 0; n < at_once && first + n < map.windows; ++n) map.turn_back(sums + n * VRQ, RQ, out + (first + n) * JRQ);
    });
}

// --------------------------------------------------------------------------------------------- the gradients of all rounds

#ifndef ITEMS_FULL
#define ITEMS_FULL 1
#endif
// ITEMS places of one window
template <int ITEMS>
struct Some {
    const vf* w;       // [ITEMS][V][PQ]
    vf *votes, *slots, *inverse;  // [ITEMS][V][RQ], [ITEMS][targets][V], [ITEMS][V]
    vf *du, *dx, *dw;  // [ITEMS][RQ], [ITEMS][RP], [ITEMS][V][PQ]
    const float* x[ITEMS];  // [RP] each
};

template <int ITEMS, class Z>
__attribute__((noinline)) void votes_of(const Z z, int V, const Some<ITEMS>& some, int targets, const vf* target) {
    const int64_t VRQ = int64_t{V} * z.RQ(), kept = int64_t{targets} * V;
    for (int h = 0; h < V; ++h) {
        for (int k = 0; k < ITEMS; ++k)
            product_into(z.R, z.P, z.Q, Matrix<float>{some.x[k], z.P, 1}, Matrix<vf>{some.w + (k * V + h) * z.PQ(), z.Q, 1},
                         some.votes + k * VRQ + h * z.RQ());
        dots<ITEMS>(targets, z.RQ(), List<const vf>{some.votes + h * z.RQ(), VRQ}, List<const vf>{target + h * z.RQ(), VRQ}, Slots{some.slots + h, kept, V});
        for (int k = 0; some.inverse != nullptr && k < ITEMS; ++k) some.inverse[k * V + h] = inverse_norm(some.votes + k * VRQ + h * z.RQ(), z.RQ());
    }
}

template <int ITEMS, class Z>
__attribute__((noinline)) void gradients_of(const Z z, int V, const Some<ITEMS>& some, int rounds, const vf* target, const vf* uniform) {
    const int64_t VRQ = int64_t{V} * z.RQ(), kept = 2 * int64_t{rounds} * V;
    for (int h = 0; h < V; ++h) {
        vote_gradient<ITEMS>(rounds, z.RQ(), Slots{some.slots + h, kept, V}, List<const vf>{target + h * z.RQ(), VRQ},
                             uniform != nullptr ? uniform + h * z.RQ() : nullptr, List<const vf>{some.votes + h * z.RQ(), VRQ},
                             some.inverse != nullptr ? some.inverse + h : nullptr, V, {some.du, z.RQ()});
        for (int k = 0; k < ITEMS; ++k) {
            const vf* du = some.du + k * z.RQ();
            product_onto(z.R, z.Q, z.P, Matrix<vf>{du, z.Q, 1}, Matrix<vf>{some.w + (k * V + h) * z.PQ(), 1, z.Q}, some.dx + k * z.RP());
            product_onto(z.P, z.R, z.Q, Matrix<float>{some.x[k], 1, z.P}, Matrix<vf>{du, z.Q, 1}, some.dw + (k * V + h) * z.PQ());
        }
    }
}

template <class Z>
void full(const Map& map, const Z z, const Gradients& g) {
    const tc_map& c = map.c;
    const int V = map.V, RP = z.RP(), RQ = z.RQ(), PQ = z.PQ(), targets = 2 * g.K;
    const int64_t VRQ = int64_t{V} * RQ, VPQ = int64_t{V} * PQ, JRQ = c.J * RQ, kept = int64_t{targets} * V, round = map.windows * JRQ;
    const int64_t per_window = (targets + 1) * VRQ;  // [window][grad, state of each round, then uniform][V][RQ]
    Buffer weight(map.children * VPQ * LANES), packed(map.windows * per_window * LANES);
    map.turn_all(c.weight, map.children, PQ, weight.vectors(), VPQ);
    for (int k = 0; k < g.K; ++k) {
        map.turn_all(g.grads + k * round, map.windows, RQ, packed.vectors() + 2 * k * VRQ, per_window);
        map.turn_all(g.states + k * round, map.windows, RQ, packed.vectors() + (2 * k + 1) * VRQ, per_window);
    }
    if (g.uniform != nullptr) map.turn_all(g.uniform, map.windows, RQ, packed.vectors() + targets * VRQ, per_window);
    const Bias bias(map);
    const Places places(map);

    parallel_for(c.C, map.threads, [&](int64_t type) {
        constexpr int ITEMS = ITEMS_FULL;
        const Scratch scratch({ceil_div(ITEMS * RP, LANES), ceil_div(RP, LANES), ITEMS * VRQ, ITEMS * kept, int64_t{ITEMS} * V, int64_t{ITEMS} * RQ,
                               int64_t{ITEMS} * RP, (map.kernel + 1) * VPQ, map.kernel * VPQ, (map.kernel + 1) * V});
        const auto [poses, dx_lanes, votes, slots, inverse, du, dx, dw, dw_total, dp] = scratch.parts;
        float *dx_sum = reinterpret_cast<float*>(dx_lanes);
        std::fill(dw, dw + map.kernel * VPQ, vf{});
        std::fill(dw_total, dw_total + map.kernel * VPQ, vf{});
        std::fill(dp, dp + map.kernel * V, vf{});
        for (int64_t n = 0; n < c.N; ++n) {
            float* own = g.d_poses + (n * c.C + type) * c.H * c.W * RP;
            std::fill(own, own + c.H * c.W * RP, 0.0f);
        }
        for (int64_t window = 0; window < map.windows; ++window) {
            const Places::Window here = places.window(window);
            const vf *target = packed.vectors() + window * per_window, *uniform = g.uniform != nullptr ? target + targets * VRQ : nullptr;
            const auto visit = [&, dx_sum = dx_sum](auto items, int64_t place) {
                constexpr int M = decltype(items)::value;
                const int64_t i = type * map.kernel + place;
                const vf* biases[M];
                Some<M> some{weight.vectors() + i * VPQ, scratch.parts[2], scratch.parts[3], c.cosine ? scratch.parts[4] : nullptr,
                             scratch.parts[5], scratch.parts[6], scratch.parts[7] + place * VPQ, {}};
                bool any = false;
                for (int k = 0; k < M; ++k) {
                    some.x[k] = places.pose(here, i + k);
                    any |= some.x[k] != places.zeros();
                    biases[k] = bias.of(i + k);
                }
                if (!any) return;
                votes_of(z, V, some, targets, target);
                couple_lanes(c.leaky, V, M, targets, some.slots, biases, some.inverse);
                for (int k = 0; g.d_prior != nullptr && k < M; ++k)
                    for (int r = 1; r < targets; r += 2)
                        for (int h = 0; h < V; ++h) scratch.parts[9][(place + k) * V + h] += some.slots[k * kept + r * V + h];
                std::fill(some.dx, some.dx + M * RP, vf{});
                gradients_of(z, V, some, g.K, target, uniform);
                for (int k = 0; k < M; ++k) {
                    if (some.x[k] == places.zeros()) continue;
                    float* own = g.d_poses + (some.x[k] - c.poses);
                    sum_lanes_each(some.dx + k * RP, RP, dx_sum);
                    for (int e = 0; e < RP; ++e) own[e] += dx_sum[e];
                }
            };
            int64_t place = 0;
            for (; place + ITEMS <= map.kernel; place += ITEMS) visit(constant<ITEMS>, place);
            if constexpr (ITEMS > 1)
                if (place < map.kernel) visit(constant<1>, place);
            if (window % SUM_BLOCK == SUM_BLOCK - 1 || window + 1 == map.windows) flush(dw, dw_total, map.kernel * VPQ);
        }
        for (int64_t place = 0; place < map.kernel; ++place) {
            const int64_t i = type * map.kernel + place;
            map.turn_back(dw_total + place * VPQ, PQ, g.d_weight + i * c.J * PQ);
            if (g.d_prior != nullptr) std::memcpy(g.d_prior + i * c.J, dp + place * V, sizeof(float) * static_cast<std::size_t>(c.J));
        }
    });
}

template <class Use>
void with_pose(const tc_map& c, Use&& use) {
    const Pose pose{static_cast<int>(c.R), static_cast<int>(c.P), static_cast<int>(c.Q)};
    if (is<4, 4, 4>(pose)) use(Fixed<4, 4, 4>{});
    else use(pose);
}

}  // namespace

void map_pass(const tc_map& c, const float* state, const float* grad, float* out) {
    with_pose(c, [&](auto z) { pass(Map{c}, z, state, grad, out); });
}

void map_full(const tc_map& c, const Gradients& g) {
    with_pose(c, [&](auto z) { full(Map{c}, z, g); });
}

}  // namespace torchcaps
