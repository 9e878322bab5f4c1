// Convolutional capsules without unfolding: every window of the map has parents of its own, and reads its children in place.
// Lanes = parents; poses are scalars. Weights and parents are turned once per call: [child or window][vector][entry].
//
// Sums over children belong to their window; gradients of poses and weights belong to the type of the child, whose owner
// walks the windows in order. Results are bitwise the same for every thread count.
#include <limits>
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
    explicit Places(const Map& map) : c_(map.c), places_(static_cast<std::size_t>(map.children)),
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

    // The pose of a child of a window; zeros where that is padding.
    TC_INLINE const float* pose(const Window& window, int64_t child) const {
        const Place& place = places_[static_cast<std::size_t>(child)];
        const int64_t y = window.top + place.row, x = window.left + place.column;
        if (y < 0 || y >= c_.H || x < 0 || x >= c_.W) return zeros();
        return c_.poses + (window.first + place.offset) * c_.R * c_.P;
    }
    const float* zeros() const { return zeros_.data(); }

private:
    struct Place {
        int64_t row, column, offset;
    };
    const tc_map& c_;
    std::vector<Place> places_;
    std::vector<float> zeros_;
};

// Poses of children begin .. end in one window; children too many have zeros.
class Poses {
public:
    Poses(const Places& places, int64_t window, int64_t begin, int64_t end)
        : zeros_(places.zeros()), x_(static_cast<std::size_t>(end - begin + AHEAD + 3), places.zeros()), begin_(begin) {
        const Places::Window here = places.window(window);
        for (int64_t i = begin; i < end; ++i) x_[static_cast<std::size_t>(i - begin)] = places.pose(here, i);
    }
    const float* const* of(int64_t child) const { return x_.data() + (child - begin_); }

    // Whether child i or i + 1 lies in the map. Asks for one that comes soon: the next pose is seldom the next in memory.
    TC_INLINE bool any(int64_t i) const {
        const float* const* own = of(i);
        __builtin_prefetch(own[AHEAD]);
        __builtin_prefetch(own[AHEAD + 1]);
        return own[0] != zeros_ || own[1] != zeros_;
    }

private:
    static constexpr int64_t AHEAD = 4;
    const float* zeros_;
    std::vector<const float*> x_;
    int64_t begin_;
};

// What is added to the logits of a child, [V]: the prior, and for lanes behind the last parent -inf, which leaves them no
// share. Null where nothing is.
class Bias {
public:
    explicit Bias(const Map& map) : V_(map.V), step_(map.c.prior != nullptr ? map.V : 0), needed_(map.c.prior != nullptr || map.J % LANES != 0),
          memory_((map.c.prior != nullptr ? map.children : 1) * map.V * LANES) {
        const int64_t width = int64_t{V_} * LANES, rows = step_ != 0 ? map.children : 1;
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < width; ++j)
                memory_.floats()[i * width + j] = j >= map.J ? -std::numeric_limits<float>::infinity() : step_ != 0 ? map.c.prior[i * map.J + j] : 0.0f;
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

// Two children, who share every look at the parents of a window.
struct Two {
    const float* const* x;  // their poses
    const vf* w;
    int64_t w_next;          // weights [V][PQ] at w and at w + w_next
    List<vf> votes;          // of child k towards vector h of parents: at item k, h * votes_step further
    int votes_step;
    vf* slots;               // [child][targets][V]
    vf* inverse;             // [child][V], or null without cosine agreement

    List<vf> towards(int h) const { return {votes.data + int64_t{h} * votes_step, votes.stride}; }
};

template <int T, class Z>
__attribute__((noinline)) void votes_of_two(const Z z, int V, const Two& two, int targets, const vf* target) {
    const int64_t VRQ = int64_t{V} * z.RQ(), kept = int64_t{targets} * V;
    for (int h = 0; h < V; ++h) {
        const vf* w = two.w + h * z.PQ();
        const List<vf> u = two.towards(h);
        two_votes<T>(z, Matrix<float>{two.x[0], z.P, 1}, Matrix<float>{two.x[1], z.P, 1}, Matrix<vf>{w, z.Q, 1}, Matrix<vf>{w + two.w_next, z.Q, 1},
                     targets, List<const vf>{target + h * z.RQ(), VRQ}, u, Slots{two.slots + h, kept, V});
        for (int k = 0; two.inverse != nullptr && k < 2; ++k) two.inverse[k * V + h] = inverse_norm(u.data + k * u.stride, z.RQ());
    }
}

// Votes of children i and i + 1 of a window, in `votes` and `slots`; with `kept` no votes but what cosine agreement needs.
template <class Z>
Two votes_of_pair(const Map& map, const Z& z, const Poses& poses, int64_t i, const vf* weight, int targets, const vf* target, const List<vf> votes,
                  int votes_step, vf* slots, vf* inverse) {
    const int64_t VPQ = int64_t{map.V} * z.PQ(), last = map.children - 1;
    const Two two{poses.of(i), weight + std::min(i, last) * VPQ, i < last ? VPQ : 0, votes, votes_step, slots, map.c.cosine ? inverse : nullptr};
    auto function = votes_of_two<0, Z>;
    if constexpr (!std::is_same_v<Z, Pose>) {
        if (targets == 1) function = votes_of_two<1, Z>;
        if (targets == 2) function = votes_of_two<2, Z>;
        if (targets == 4 && !map.c.cosine) function = votes_of_two<4, Z>;
    }
    function(z, map.V, two, targets, target);
    return two;
}

// sum [V][RQ] += shares [child][..][V] times votes [child][V][RQ] of FOUR children
constexpr int FOUR = 4;  // whose softmaxes hide each other's latency

template <class Z>
__attribute__((noinline)) void add_four(const Z z, int V, const vf* votes, vf* shares, int64_t next, vf* sum) {
    for (int h = 0; h < V; ++h) {
        const List<vf> to{sum + h * z.RQ(), 0};
        mix_of<1, FOUR>(z.RQ(), Slots{shares + h, 0, next}, List<const vf>{votes + h * z.RQ(), int64_t{V} * z.RQ()}, to, 1, to);
    }
}

template <class Z>
void walk(const Map& map, const Places& places, const Z z, const vf* weight, const Bias& bias, int targets, const float* state, const float* grad,
          int64_t window, float* out) {
    const int V = map.V, RQ = z.RQ();
    const int64_t VRQ = int64_t{V} * RQ, JRQ = map.c.J * RQ, kept = int64_t{targets} * V;
    const Scratch scratch({targets * VRQ, FOUR * VRQ, FOUR * kept, FOUR * int64_t{V}, VRQ, VRQ});
    const auto [target, votes, slots, inverse, sum, total] = scratch.parts;
    if (grad != nullptr) map.turn(grad + window * JRQ, RQ, target);
    map.turn(state + window * JRQ, RQ, target + (targets - 1) * VRQ);
    std::fill(sum, sum + VRQ, vf{});
    std::fill(total, total + VRQ, vf{});
    const Poses poses(places, window, 0, map.children);
    for (int64_t i = 0; i < map.children; i += FOUR) {
        if (poses.any(i) | poses.any(i + 2)) {
            const vf* biases[FOUR];
            for (int k = 0; k < FOUR; ++k) biases[k] = bias.of(std::min(i + k, map.children - 1));
            for (int k = 0; k < FOUR; k += 2)
                votes_of_pair(map, z, poses, i + k, weight, targets, target, {votes + k * VRQ, VRQ}, RQ, slots + k * kept, inverse + k * V);
            couple_lanes(map.c.leaky, V, FOUR, targets, slots, biases, map.c.cosine ? inverse : nullptr);
            vf* shares = slots + (targets - 1) * V;
            for (int k = 0; map.c.cosine && targets == 2 && k < FOUR; ++k)
                for (int h = 0; h < V; ++h) shares[k * kept + h] *= inverse[k * V + h];
            add_four(z, V, votes, shares, kept, sum);
        }
        if ((i + FOUR) % SUM_BLOCK == 0 || i + FOUR >= map.children) flush(sum, total, VRQ);
    }
    map.turn_back(total, RQ, out + window * JRQ);
}

constexpr int SUM_WINDOWS = 4, SUM_CHILDREN = 8;  // of one product of the plain sum

// Windows first .. first + SUM_WINDOWS: those too many are the last once more.
template <class Z>
void walk_sum(const Map& map, const Places& places, const Z z, const vf* weight, int64_t first, float* out) {
    const int V = map.V, RP = z.RP(), RQ = z.RQ();
    const int64_t VRQ = int64_t{V} * RQ, VPQ = int64_t{V} * z.PQ(), each = SUM_WINDOWS * VRQ;
    const Scratch scratch({ceil_div(SUM_WINDOWS * SUM_CHILDREN * RP, LANES), each, each, VRQ});
    const auto [poses, sum, total, own] = scratch.parts;  // sums [V][window][RQ]
    float* x = reinterpret_cast<float*>(poses);
    std::fill(sum, sum + each, vf{});
    std::fill(total, total + each, vf{});
    Places::Window window[SUM_WINDOWS];
    for (int n = 0; n < SUM_WINDOWS; ++n) window[n] = places.window(std::min(first + n, map.windows - 1));
    for (int64_t i = 0; i < map.children; i += SUM_CHILDREN) {
        const int many = static_cast<int>(std::min<int64_t>(SUM_CHILDREN, map.children - i));
        for (int t = 0; t < many; ++t)
            for (int n = 0; n < SUM_WINDOWS; ++n) std::copy_n(places.pose(window[n], i + t), RP, x + (t * SUM_WINDOWS + n) * RP);
        for (int h = 0; h < V; ++h)
            product_onto(SUM_WINDOWS * z.R, z.P, z.Q, Matrix<float>{x, z.P, 1, SUM_WINDOWS * RP}, Matrix<vf>{weight + i * VPQ + h * z.PQ(), z.Q, 1, VPQ},
                         sum + h * SUM_WINDOWS * RQ, many);
        if ((i + SUM_CHILDREN) % SUM_BLOCK == 0 || i + SUM_CHILDREN >= map.children) flush(sum, total, each);
    }
    for (int n = 0; n < SUM_WINDOWS && first + n < map.windows; ++n) {
        for (int h = 0; h < V; ++h) std::copy_n(total + (h * SUM_WINDOWS + n) * RQ, RQ, own + h * RQ);
        map.turn_back(own, RQ, out + (first + n) * map.c.J * RQ);
    }
}

template <class Z>
void pass(const Map& map, const Z z, const float* state, const float* grad, float* out) {
    const int64_t VPQ = int64_t{map.V} * z.PQ();
    Buffer weight(map.children * VPQ * LANES);
    map.turn_all(map.c.weight, map.children, z.PQ(), weight.vectors(), VPQ);
    const Bias bias(map);
    const Places places(map);
    if (state == nullptr)
        parallel_for(ceil_div(map.windows, SUM_WINDOWS), map.threads,
                     [&](int64_t task) { walk_sum(map, places, z, weight.vectors(), task * SUM_WINDOWS, out); });
    else
        parallel_for(map.windows, map.threads, [&](int64_t window) {
            walk(map, places, z, weight.vectors(), bias, grad != nullptr ? 2 : 1, state, grad, window, out);
        });
}

// --------------------------------------------------------------------------------------------- the gradients of all rounds

// dx [child][RP] and dw [child][V][PQ] of two children in one window; du [child][V][RQ] to work on
template <int ROUNDS, class Z>
__attribute__((noinline)) void gradients_of_two(const Z z, int V, const Two& two, int rounds, const vf* target, bool uniform, vf* du, vf* dx, vf* dw) {
    const int64_t VRQ = int64_t{V} * z.RQ(), VPQ = int64_t{V} * z.PQ();
    for (int h = 0; h < V; ++h) {
        const vf* own = target + h * z.RQ();
        vote_gradient<2, ROUNDS>(rounds, z.RQ(), Slots{two.slots + h, 2 * int64_t{rounds} * V, V}, List<const vf>{own, VRQ},
                                 uniform ? own + 2 * rounds * VRQ : nullptr, two.towards(h).fixed(), two.inverse != nullptr ? two.inverse + h : nullptr,
                                 V, {du + h * z.RQ(), VRQ});
        for (int k = 0; k < 2; ++k)
            product_onto(z.P, z.R, z.Q, Matrix<float>{two.x[k], 1, z.P}, Matrix<vf>{du + k * VRQ + h * z.RQ(), z.Q, 1}, dw + k * VPQ + h * z.PQ());
    }
    for (int k = 0; k < 2; ++k)
        product_into(z.R, z.Q, z.P, Matrix<vf>{du + k * VRQ, z.Q, 1, z.RQ()}, Matrix<vf>{two.w + k * two.w_next, 1, z.Q, z.PQ()}, dx + k * z.RP(), V);
}

// Windows whose parents stay in the second cache while all children walk over them; their sums are a block of the sum.
int64_t band_of(int64_t vectors) {
    constexpr int64_t CACHE = 256 << 10;
    return std::clamp<int64_t>(CACHE / (vectors * static_cast<int64_t>(sizeof(vf))), 1, SUM_BLOCK);
}

void add(const float* more, int64_t count, float* to) {
    for (int64_t e = 0; e < count; ++e) to[e] += more[e];
}

template <class Z>
void full(const Map& map, const Z z, const Gradients& g) {
    const tc_map& c = map.c;
    const int V = map.V, RP = z.RP(), RQ = z.RQ(), PQ = z.PQ(), targets = 2 * g.K;
    const int64_t VRQ = int64_t{V} * RQ, VPQ = int64_t{V} * PQ, JRQ = c.J * RQ, kept = int64_t{targets} * V;
    const int64_t per_window = (targets + 1) * VRQ;  // [window][grad, state of each round, then uniform][V][RQ]
    const int64_t band = band_of(per_window);
    Buffer weight(map.children * VPQ * LANES), packed(std::min(band, map.windows) * per_window * LANES);
    map.turn_all(c.weight, map.children, PQ, weight.vectors(), VPQ);
    const Bias bias(map);
    const Places places(map);

    const int64_t example = c.C * c.H * c.W * RP;
    expect_writing(g.d_poses, c.N * example);
    parallel_for(c.N, map.threads, [&](int64_t n) { std::fill_n(g.d_poses + n * example, example, 0.0f); });
    std::fill_n(g.d_weight, map.children * c.J * PQ, 0.0f);
    if (g.d_prior != nullptr) std::fill_n(g.d_prior, map.children * c.J, 0.0f);
    // Children come in pairs: two types together make an even number of them.
    const int64_t types = map.kernel % 2 != 0 && c.C > 1 ? 2 : 1;
    for (int64_t from = 0; from < map.windows; from += band) {
        const int64_t to = std::min(from + band, map.windows);
        for (int k = 0; k < g.K; ++k) {
            map.turn_all(g.grads[k] + from * JRQ, to - from, RQ, packed.vectors() + 2 * k * VRQ, per_window);
            map.turn_all(g.states[k] + from * JRQ, to - from, RQ, packed.vectors() + (2 * k + 1) * VRQ, per_window);
        }
        if (g.uniform != nullptr) map.turn_all(g.uniform + from * JRQ, to - from, RQ, packed.vectors() + targets * VRQ, per_window);
        parallel_for(ceil_div(c.C, types), map.threads, [&](int64_t task) {
            const int64_t begin = task * types * map.kernel, end = std::min(begin + types * map.kernel, map.children);
            const int64_t many = end - begin + 1, votes_size = c.cosine ? VRQ : RQ;  // one child too many; votes of one vector are kept
            const Scratch scratch({2 * votes_size, 2 * kept, 2 * int64_t{V}, 2 * VRQ, 2 * int64_t{RP}, ceil_div(RP, LANES), many * VPQ, many * V, VPQ});
            const auto [votes, slots, inverse, du, dx, dx_lanes, dw, dp, spare] = scratch.parts;
            float* dx_sum = reinterpret_cast<float*>(dx_lanes);
            std::fill(dw, dw + many * VPQ, vf{});
            std::fill(dp, dp + many * V, vf{});
            for (int64_t window = from; window < to; ++window) {
                const vf* target = packed.vectors() + (window - from) * per_window;
                const Poses poses(places, window, begin, end);
                for (int64_t i = begin; i < end; i += 2) {
                    if (!poses.any(i)) continue;
                    const vf* biases[2] = {bias.of(i), bias.of(std::min(i + 1, end - 1))};
                    const Two two = votes_of_pair(map, z, poses, i, weight.vectors(), targets, target, {votes, votes_size}, c.cosine ? RQ : 0, slots, inverse);
                    couple_lanes(c.leaky, V, 2, targets, slots, biases, two.inverse);
                    for (int k = 0; g.d_prior != nullptr && k < 2; ++k)
                        for (int r = 1; r < targets; r += 2)
                            for (int h = 0; h < V; ++h) dp[(i - begin + k) * V + h] += slots[k * kept + r * V + h];
                    const auto gradients = !std::is_same_v<Z, Pose> && g.K == 2 && !c.cosine ? gradients_of_two<std::is_same_v<Z, Pose> ? 0 : 2, Z> : gradients_of_two<0, Z>;
                    gradients(z, V, two, g.K, target, g.uniform != nullptr, du, dx, dw + (i - begin) * VPQ);
                    for (int k = 0; k < 2; ++k) {
                        if (two.x[k] == places.zeros()) continue;
                        float* own = g.d_poses + (two.x[k] - c.poses);
                        sum_lanes_each(dx + k * RP, RP, dx_sum);
                        for (int e = 0; e < RP; ++e) own[e] += dx_sum[e];
                    }
                }
            }
            float* rows = reinterpret_cast<float*>(spare);
            for (int64_t i = begin; i < end; ++i) {
                map.turn_back(dw + (i - begin) * VPQ, PQ, rows);
                add(rows, c.J * PQ, g.d_weight + i * c.J * PQ);
                if (g.d_prior != nullptr) add(reinterpret_cast<const float*>(dp + (i - begin) * V), c.J, g.d_prior + i * c.J);
            }
        });
    }
}

}  // namespace

void map_pass(const tc_map& c, const float* state, const float* grad, float* out) {
    with_pose<Fixed<4, 4, 4>>(pose_of(c), [&](auto z) { pass(Map{c}, z, state, grad, out); });
}

void map_full(const tc_map& c, const Gradients& g) {
    with_pose<Fixed<4, 4, 4>>(pose_of(c), [&](auto z) { full(Map{c}, z, g); });
}

}  // namespace torchcaps
