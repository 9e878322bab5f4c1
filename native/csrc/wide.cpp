// Fully connected capsules, lanes = rows of the batch.
#include "connected.h"

namespace torchcaps {
namespace {

constexpr int TILE = 8;  // children whose poses are turned together

int64_t weight_step(const tc_connected& c) { return c.shared ? 0 : c.J * c.P * c.Q; }

int rows_of(const tc_connected& c, int64_t block) { return static_cast<int>(std::min<int64_t>(LANES, c.N - block * LANES)); }

// Poses of up to TILE children in up to LANES rows: as rows (for the gradient of the weight) and turned (for the votes). An odd
// number of children is made even by one whose pose is zero.
struct Poses {
    float* rows;  // [LANES][stride]
    vf* turned;   // [children * RP]
    int64_t stride;

    static int64_t rows_size(int64_t RP) { return TILE * RP + 1; }  // + 1: add_over_rows reads beyond the last
    static int64_t turned_size(int64_t RP) { return TILE * RP; }

    void load(const tc_connected& c, int64_t block, int64_t i, int children) {
        const int64_t RP = c.R * c.P;
        const int n = rows_of(c, block);
        for (int l = 0; l < n; ++l)  // rows first: in place they may all fall into one set of the cache
            std::memcpy(rows + l * stride, c.poses + ((block * LANES + l) * c.I + i) * RP, sizeof(float) * children * RP);
        rows_to_lanes(rows, stride, n, static_cast<int>(children * RP), turned);
        if (children % 2 != 0) {
            std::fill(turned + children * RP, turned + (children + 1) * RP, vf{});
            for (int l = 0; l < n; ++l) std::fill(rows + l * stride + children * RP, rows + l * stride + (children + 1) * RP, 0.0f);
        }
    }
};

// [N][count] -> [blocks][..][count] of vectors
void pack_rows(const tc_connected& c, const float* from, int64_t count, vf* to, int64_t block_step) {
    parallel_for(ceil_div(c.N, LANES), static_cast<int>(c.threads), [&](int64_t b) {
        rows_to_lanes(from + b * LANES * count, count, rows_of(c, b), static_cast<int>(count), to + b * block_step);
    });
}

// Two children, who share every look at the parents.
struct Two {
    const vf* x;  // [2][RP]
    const float* w;
    int64_t w_next;          // weights [J][PQ] at w and at w + w_next
    List<vf> votes;          // of child k towards parent j: at item k, j * votes_step further
    int votes_step;
    Slots slots;             // (child, target), each [J]
    vf* inverse;             // [2][J], or null without cosine agreement

    List<vf> towards(int j) const { return {votes.data + int64_t{j} * votes_step, votes.stride}; }
};

template <int T, class Z>
__attribute__((noinline)) void votes_of_two(const Z z, int J, const Two& two, int targets, const List<const vf> target) {
    for (int j = 0; j < J; ++j) {
        const List<vf> u = two.towards(j);
        const float* w = two.w + int64_t{j} * z.PQ();
        two_votes<T>(z, Matrix<vf>{two.x, z.P, 1}, Matrix<vf>{two.x + z.RP(), z.P, 1}, Matrix<float>{w, z.Q, 1}, Matrix<float>{w + two.w_next, z.Q, 1},
                     targets, List<const vf>{target.data + int64_t{j} * z.RQ(), target.stride}, u, Slots{two.slots.data + j, two.slots.item, two.slots.target});
        for (int k = 0; two.inverse != nullptr && k < 2; ++k) two.inverse[k * J + j] = inverse_norm(u.data + k * u.stride, z.RQ());
    }
}

template <class Z>
void votes_of_two(const Z& z, int J, const Two& two, int targets, const List<const vf> target) {
    auto votes = votes_of_two<0, Z>;
    if constexpr (!std::is_same_v<Z, Pose>) {
        if (targets == 1) votes = votes_of_two<1, Z>;
        if (targets == 2) votes = votes_of_two<2, Z>;
        if (targets == 4 && !two.inverse) votes = votes_of_two<4, Z>;
    }
    votes(z, J, two, targets, target);
}

// sum_j += share_j u_j of both
template <class Z>
__attribute__((noinline)) void add_two(const Z z, int J, const Two& two, int target, vf* sum) {
    for (int j = 0; j < J; ++j) {
        const List<vf> to{sum + int64_t{j} * z.RQ(), 0};
        mix_of<1, 2>(z.RQ(), Slots{two.slots.from(target).data + j, 0, two.slots.item}, two.towards(j).fixed(), to, 1, to);
    }
}

// sum_j += u_j of all children of a tile
template <class Z>
__attribute__((noinline)) void add_votes(const Z z, int J, int children, const vf* x, const float* w, int64_t w_next, vf* sum) {
    for (int j = 0; j < J; ++j)
        product_onto(z.R, z.P, z.Q, Matrix<vf>{x, z.P, 1, z.RP()}, Matrix<float>{w + int64_t{j} * z.PQ(), z.Q, 1, w_next},
                     sum + int64_t{j} * z.RQ(), children);
}

// Children i0 .. i1 of one block of rows: out = sum_i u_ij without a target, sum_i c_ij u_ij with one, the state, sum_i d_ij u_ij
// with two, grad and state.
template <class Z>
void walk(const tc_connected& c, const Z z, int targets, const vf* target, int64_t i0, int64_t i1, int64_t block, vf* out) {
    const int J = static_cast<int>(c.J), RP = z.RP(), JRQ = J * z.RQ(), kept = targets * J;
    const Scratch scratch({Poses::rows_size(RP), Poses::turned_size(RP), 2 * int64_t{JRQ}, 2 * int64_t{kept}, 2 * int64_t{J}, int64_t{JRQ}});
    const auto [rows, turned, votes, slots, inverse, sum] = scratch.parts;
    Poses poses{reinterpret_cast<float*>(rows), turned, int64_t{TILE} * RP};
    std::fill(out, out + JRQ, vf{});
    std::fill(sum, sum + JRQ, vf{});
    int waiting = 0;
    for (int64_t i = i0; i < i1; i += TILE) {
        const int children = static_cast<int>(std::min<int64_t>(TILE, i1 - i));
        poses.load(c, block, i, children);
        if (targets == 0) add_votes(z, J, children, turned, c.weight + i * weight_step(c), weight_step(c), sum);
        else
            for (int t = 0; t < children; t += 2) {
                const Two two{turned + t * RP, c.weight + (i + t) * weight_step(c), t + 1 < children ? weight_step(c) : 0,
                              {votes, JRQ}, z.RQ(), {slots, kept, J}, c.cosine ? inverse : nullptr};
                votes_of_two(z, J, two, targets, {target, JRQ});
                for (int k = 0; k < 2; ++k) {
                    vf *own = slots + k * kept, *norms = inverse + k * J;
                    couple(c, targets, own, c.prior == nullptr || t + k >= children ? nullptr : c.prior + (i + t + k) * J, norms);
                    if (c.cosine && targets == 2)
                        for (int j = 0; j < J; ++j) own[J + j] *= norms[j];
                }
                add_two(z, J, two, targets - 1, sum);
            }
        waiting += children;
        if (waiting >= SUM_BLOCK || i + TILE >= i1) {
            flush(sum, out, JRQ);
            waiting = 0;
        }
    }
}

// ------------------------------------------------------------------------------------------- the gradients of all rounds

// dw [Q][padded P] += sum over n rows of x_p du_q of a vector pose: lanes = entries of the pose.
template <int W, class Z>
TC_INLINE void add_over_rows(const Z z, const float* x, int64_t stride, int n, const float* du, float* dw) {
    using v = typename Wide<W>::f;
    const int P = static_cast<int>(ceil_div(z.P, W) * W);
    const auto columns = [&](auto width, int p, int q) __attribute__((always_inline)) {
        constexpr int B = decltype(width)::value;
        v total[B];
#pragma GCC unroll 8
        for (int k = 0; k < B; ++k) total[k] = v{};
        const float* row = x + p;
#pragma GCC unroll 2
        for (int l = 0; l < n; ++l, row += stride) {
            const v xl = load<W>(row);
#pragma GCC unroll 8
            for (int k = 0; k < B; ++k) total[k] += du[(q + k) * LANES + l] * xl;
        }
#pragma GCC unroll 8
        for (int k = 0; k < B; ++k) store<W>(dw + (q + k) * P + p, load<W>(dw + (q + k) * P + p) + total[k]);
    };
    for (int p = 0; p < P; p += W) {
        int q = 0;
        for (; q + 8 <= z.Q; q += 8) columns(constant<8>, p, q);
        for (; q < z.Q; ++q) columns(constant<1>, p, q);
    }
}

// The gradient of the weight of one child sums over the batch. Vector poses sum over the lanes at once (by rows), into floats
// [J, Q, padded P]; others keep a vector of lanes for each entry, [J, P, Q].
template <class Z>
struct WeightGradient {
    const Z z;
    const bool by_rows = z.R == 1;
    const int width = z.P >= LANES ? LANES : z.P > 4 && LANES > 4 ? 8 : 4;  // lanes of add_over_rows
    const int padded = static_cast<int>(ceil_div(z.P, width) * width);

    int64_t vectors(int J) const { return by_rows ? ceil_div(int64_t{J} * z.Q * padded, LANES) : int64_t{J} * z.PQ(); }

    TC_INLINE void add(int j, const float* rows, int64_t stride, int n, const vf* turned, const vf* du, vf* dw) const {
        if (!by_rows)
            return product_onto(z.P, z.R, z.Q, Matrix<vf>{turned, 1, z.P}, Matrix<vf>{du, z.Q, 1}, dw + int64_t{j} * z.PQ());
        const float* d = reinterpret_cast<const float*>(du);
        float* to = reinterpret_cast<float*>(dw) + int64_t{j} * z.Q * padded;
        if (width == LANES) add_over_rows<LANES>(z, rows, stride, n, d, to);
        else if (width == 8) add_over_rows<(LANES > 8 ? 8 : 4)>(z, rows, stride, n, d, to);
        else add_over_rows<4>(z, rows, stride, n, d, to);
    }
    void finish(int J, const vf* dw, float* to) const {
        if (!by_rows) return sum_lanes_each(dw, int64_t{J} * z.PQ(), to);
        const float* from = reinterpret_cast<const float*>(dw);
        for (int j = 0; j < J; ++j) transpose(from + int64_t{j} * z.Q * padded, padded, z.Q, z.P, to + int64_t{j} * z.PQ(), z.Q);
    }
};

template <int ROUNDS, class Z>
__attribute__((noinline)) void gradients_of_two(const WeightGradient<Z>& weight, int J, const Two& two, int rounds, const List<const vf> target,
                                                const vf* uniform, const float* rows, int64_t stride, int n, vf* du, vf* dx, const List<vf> dw) {
    const Z z = weight.z;
    for (int j = 0; j < J; ++j) {
        const int64_t at = int64_t{j} * z.RQ();
        vote_gradient<2, ROUNDS>(rounds, z.RQ(), Slots{two.slots.data + j, two.slots.item, two.slots.target}, List<const vf>{target.data + at, target.stride},
                         uniform != nullptr ? uniform + at : nullptr, two.towards(j).fixed(), two.inverse != nullptr ? two.inverse + j : nullptr,
                         J, {du, z.RQ()});
        for (int k = 0; k < 2; ++k) {
            const vf* d = du + k * z.RQ();
            product_onto(z.R, z.Q, z.P, Matrix<vf>{d, z.Q, 1}, Matrix<float>{two.w + k * two.w_next + int64_t{j} * z.PQ(), 1, z.Q}, dx + k * z.RP());
            weight.add(j, rows + k * z.RP(), stride, n, two.x + k * z.RP(), d, dw.data + k * dw.stride);
        }
    }
}

template <class Z>
void full(const tc_connected& c, const Z z, const Gradients& g) {
    const int J = static_cast<int>(c.J), RP = z.RP(), RQ = z.RQ(), targets = 2 * g.K, threads = static_cast<int>(c.threads);
    const int64_t JRQ = int64_t{J} * RQ, JPQ = int64_t{J} * z.PQ(), blocks = ceil_div(c.N, LANES), kept = int64_t{targets} * J;

    const int64_t per_block = (targets + 1) * JRQ;  // [block][grad, state of each round, then uniform][JRQ]
    Buffer packed(blocks * per_block * LANES);
    for (int k = 0; k < g.K; ++k) {
        pack_rows(c, g.grads[k], JRQ, packed.vectors() + 2 * k * JRQ, per_block);
        pack_rows(c, g.states[k], JRQ, packed.vectors() + (2 * k + 1) * JRQ, per_block);
    }
    if (g.uniform != nullptr) pack_rows(c, g.uniform, JRQ, packed.vectors() + targets * JRQ, per_block);

    const WeightGradient<Z> weight{z};
    const int64_t size = weight.vectors(J);
    const int tile = size <= 1024 ? TILE : 2;  // their gradients stay in the second cache
    const int64_t held = c.shared ? 1 : tile, length = c.shared ? Chunks(c.I, 16, tile).length : tile, count = ceil_div(c.I, length);
    Buffer parts(c.shared ? count * JPQ : 1);

    expect_writing(g.d_poses, c.N * c.I * RP);
    expect_writing(g.d_weight, c.shared ? JPQ : c.I * JPQ);
    parallel_for(count, threads, [&](int64_t task) {
        const int64_t votes_size = c.cosine ? JRQ : RQ;
        const Scratch scratch({Poses::rows_size(RP), Poses::turned_size(RP), int64_t{TILE} * RP, 2 * votes_size, 2 * kept, 2 * int64_t{J},
                               2 * int64_t{RQ}, held * size, int64_t{tile} * J});
        const auto [rows, turned, dx, votes, slots, inverse, du, dw, dp] = scratch.parts;
        Poses poses{reinterpret_cast<float*>(rows), turned, int64_t{TILE} * RP};
        const int64_t begin = task * length, end = std::min(begin + length, c.I);
        if (c.shared) std::fill(dw, dw + size, vf{});
        for (int64_t i = begin; i < end; i += tile) {
            const int children = static_cast<int>(std::min<int64_t>(tile, end - i));
            if (!c.shared) std::fill(dw, dw + held * size, vf{});
            std::fill(dp, dp + tile * J, vf{});
            for (int64_t block = 0; block < blocks; ++block) {
                const int n = rows_of(c, block);
                const vf* target = packed.vectors() + block * per_block;
                poses.load(c, block, i, children);
                std::fill(dx, dx + TILE * RP, vf{});
                for (int t = 0; t < children; t += 2) {
                    const Two two{turned + t * RP, c.weight + (i + t) * weight_step(c), t + 1 < children ? weight_step(c) : 0,
                                  {votes, votes_size}, c.cosine ? RQ : 0, {slots, kept, J}, c.cosine ? inverse : nullptr};
                    votes_of_two(z, J, two, targets, {target, JRQ});
                    for (int k = 0; k < 2; ++k) {
                        vf* own = slots + k * kept;
                        couple(c, targets, own, c.prior == nullptr || t + k >= children ? nullptr : c.prior + (i + t + k) * J, inverse + k * J);
                        for (int r = 1; g.d_prior != nullptr && r < targets; r += 2)
                            for (int j = 0; j < J; ++j) dp[(t + k) * J + j] += own[r * J + j];
                    }
                    const auto gradients = !std::is_same_v<Z, Pose> && g.K == 2 && !c.cosine ? gradients_of_two<std::is_same_v<Z, Pose> ? 0 : 2, Z> : gradients_of_two<0, Z>;
                    gradients(weight, J, two, g.K, {target, JRQ}, g.uniform != nullptr ? target + targets * JRQ : nullptr,
                                     poses.rows + t * RP, poses.stride, n, du, dx + t * RP, {dw + (c.shared ? 0 : t * size), c.shared ? 0 : size});
                }
                lanes_to_rows(dx, n, children * RP, g.d_poses + (block * LANES * c.I + i) * RP, c.I * RP);
            }
            for (int t = 0; !c.shared && t < children; ++t) weight.finish(J, dw + t * size, g.d_weight + (i + t) * JPQ);
            if (g.d_prior != nullptr) sum_lanes_each(dp, int64_t{children} * J, g.d_prior + i * J);
        }
        if (c.shared) weight.finish(J, dw, parts.floats() + task * JPQ);
    });
    if (c.shared) add_parts(parts.floats(), count, JPQ, g.d_weight);
}

}  // namespace

void wide_pass(const tc_connected& c, const float* state, const float* grad, float* out) {
    const int64_t blocks = ceil_div(c.N, LANES), JRQ = c.J * c.R * c.Q;
    const Chunks chunks(c.I, std::min<int64_t>(ceil_div(64, blocks), ceil_div(c.I, 32)), TILE);
    const int threads = static_cast<int>(c.threads), targets = (state != nullptr) + (grad != nullptr);
    Buffer packed(blocks * targets * JRQ * LANES), partial(chunks.count * blocks * JRQ * LANES);
    if (grad != nullptr) pack_rows(c, grad, JRQ, packed.vectors(), targets * JRQ);
    if (state != nullptr) pack_rows(c, state, JRQ, packed.vectors() + (targets - 1) * JRQ, targets * JRQ);
    with_pose<Fixed<1, 8, 16>, Fixed<4, 4, 4>>(pose_of(c), [&](auto z) {
        parallel_for(chunks.count * blocks, threads, [&](int64_t task) {
            const int64_t b = task % blocks, begin = task / blocks * chunks.length;
            walk(c, z, targets, packed.vectors() + b * targets * JRQ, begin, std::min(begin + chunks.length, c.I), b, partial.vectors() + task * JRQ);
        });
    });
    parallel_for(blocks, threads, [&](int64_t b) {
        vf* total = partial.vectors() + b * JRQ;
        for (int64_t chunk = 1; chunk < chunks.count; ++chunk)
            for (int64_t e = 0; e < JRQ; ++e) total[e] += partial.vectors()[(chunk * blocks + b) * JRQ + e];
        lanes_to_rows(total, rows_of(c, b), static_cast<int>(JRQ), out + b * LANES * JRQ, JRQ);
    });
}

void wide_full(const tc_connected& c, const Gradients& g) {
    with_pose<Fixed<1, 8, 16>, Fixed<4, 4, 4>>(pose_of(c), [&](auto z) { full(c, z, g); });
}

}  // namespace torchcaps
