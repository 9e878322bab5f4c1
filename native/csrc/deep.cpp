// Fully connected capsules, lanes = children: for small batches, where rows of the batch would leave lanes empty.
//
// The weights of LANES children are turned parent by parent and serve all rows of the batch, as one product, while they are in
// the first cache. Sums over the lanes come last.
#include "connected.h"

namespace torchcaps {
namespace {

// One block of up to LANES children; lanes without a child have pose 0 and take part in nothing.
struct Block {
    const tc_connected& c;
    const int64_t i;
    const int m;
    Block(const tc_connected& problem, int64_t block)
        : c(problem), i(block * LANES), m(static_cast<int>(std::min<int64_t>(LANES, c.I - i))) {}

    void load_poses(vf* x) const {  // [N][RP]
        const int64_t RP = c.R * c.P;
        for (int64_t n = 0; n < c.N; ++n)
            rows_to_lanes(c.poses + (n * c.I + i) * RP, RP, m, static_cast<int>(RP), x + n * RP);
    }
    void load_weight(int64_t j, vf* w) const {  // [PQ]
        const int64_t PQ = c.P * c.Q;
        if (c.shared)
            for (int64_t e = 0; e < PQ; ++e) w[e] = broadcast(c.weight[j * PQ + e]);
        else
            rows_to_lanes(c.weight + (i * c.J + j) * PQ, c.J * PQ, m, static_cast<int>(PQ), w);
    }
    const vf* load_prior(vf* prior) const {
        if (c.prior == nullptr) return nullptr;
        rows_to_lanes(c.prior + i * c.J, c.J, m, static_cast<int>(c.J), prior);
        return prior;
    }
};

// [N][size] -> rows `step` apart
void spread(const float* from, int64_t N, int64_t size, float* to, int64_t step) {
    for (int64_t n = 0; n < N; ++n) std::copy_n(from + n * size, size, to + n * step);
}

struct Deep {
    const tc_connected& c;
    const Pose z = pose_of(c);
    const int N = static_cast<int>(c.N), J = static_cast<int>(c.J), RP = z.RP(), RQ = z.RQ();
    const int64_t JRQ = int64_t{J} * RQ, blocks = ceil_div(c.I, LANES);
    const Chunks chunks{blocks, 16, 1};
    const int threads = static_cast<int>(c.threads);

    // Votes [N][RQ] towards parent j, and their slots [N][targets][J].
    __attribute__((noinline)) void votes(int j, const vf* x, const vf* w, int targets, const float* target, vf* u, vf* slots, vf* inverse) const {
        product_into(N * z.R, z.P, z.Q, Matrix<vf>{x, z.P, 1}, Matrix<vf>{w, z.Q, 1}, u);
        for (int n = 0; n < N; ++n) {
            dots<1>(targets, RQ, List<const vf>{u + n * RQ, 0}, List<const float>{target + n * targets * JRQ + int64_t{j} * RQ, JRQ},
                    Slots{slots + int64_t{n} * targets * J + j, 0, J});
            if (c.cosine) inverse[int64_t{n} * J + j] = inverse_norm(u + n * RQ, RQ);
        }
    }

    // d_poses [N][RP] += towards parent j, dw [PQ] += over the batch
    __attribute__((noinline)) void gradients(int j, const vf* x, const vf* w, int rounds, const float* target, const float* uniform, const vf* u,
                                             vf* slots, const vf* inverse, vf* du, vf* dx, vf* dw) const {
        const int targets = 2 * rounds;
        for (int n = 0; n < N; ++n)
            vote_gradient<1, 0>(rounds, RQ, Slots{slots + int64_t{n} * targets * J + j, 0, J},
                             List<const float>{target + n * targets * JRQ + int64_t{j} * RQ, JRQ},
                             uniform != nullptr ? uniform + n * JRQ + int64_t{j} * RQ : nullptr, List<const vf>{u + n * RQ, 0},
                             c.cosine ? inverse + int64_t{n} * J + j : nullptr, 0, {du + n * RQ, 0});
        product_onto(N * z.R, z.Q, z.P, Matrix<vf>{du, z.Q, 1}, Matrix<vf>{w, 1, z.Q}, dx);
        product_onto(z.P, N * z.R, z.Q, Matrix<vf>{x, 1, z.P}, Matrix<vf>{du, z.Q, 1}, dw);
    }

    void pass(const float* state, const float* grad, float* out) const {
        const int targets = (state != nullptr) + (grad != nullptr);
        Buffer partial(chunks.count * N * JRQ), target(N * targets * JRQ);  // [N][grad, state][JRQ]
        if (grad != nullptr) spread(grad, N, JRQ, target.floats(), targets * JRQ);
        if (state != nullptr) spread(state, N, JRQ, target.floats() + (targets - 1) * JRQ, targets * JRQ);
        parallel_for(chunks.count, threads, [&](int64_t chunk) {
            const Scratch scratch({int64_t{N} * RP, int64_t{z.PQ()}, N * JRQ, N * JRQ, int64_t{N} * targets * J, int64_t{N} * J, int64_t{J}});
            const auto [x, w, u, sum, slots, inverse, spare] = scratch.parts;  // u, sum [J][N][RQ]
            std::fill(sum, sum + N * JRQ, vf{});
            for (int64_t b = chunk * chunks.length; b < std::min((chunk + 1) * chunks.length, blocks); ++b) {
                const Block block(c, b);
                block.load_poses(x);
                for (int j = 0; j < J; ++j) {
                    const int64_t at = int64_t{j} * N * RQ;
                    block.load_weight(j, w);
                    if (targets == 0) product_onto(N * z.R, z.P, z.Q, Matrix<vf>{x, z.P, 1}, Matrix<vf>{w, z.Q, 1}, sum + at);
                    else votes(j, x, w, targets, target.floats(), u + at, slots, inverse);
                }
                if (targets == 0) continue;
                const vf* prior = block.load_prior(spare);
                for (int n = 0; n < N; ++n) {
                    vf *own = slots + int64_t{n} * targets * J, *norms = inverse + int64_t{n} * J;
                    couple(c, targets, own, prior, norms);
                    for (int j = 0; j < J; ++j) {
                        vf* share = own + (targets - 1) * J + j;
                        if (c.cosine && targets == 2) *share *= norms[j];
                        const List<vf> to{sum + (int64_t{j} * N + n) * RQ, 0};
                        mix_of<1, 1>(RQ, Slots{share, 0, 0}, List<const vf>{u + (int64_t{j} * N + n) * RQ, 0}, to, 1, to);
                    }
                }
            }
            for (int j = 0; j < J; ++j)
                for (int n = 0; n < N; ++n)
                    sum_lanes_each(sum + (int64_t{j} * N + n) * RQ, RQ, partial.floats() + (chunk * N + n) * JRQ + int64_t{j} * RQ);
        });
        add_parts(partial.floats(), chunks.count, N * JRQ, out);
    }

    void full(const Gradients& g) const {
        const int targets = 2 * g.K, PQ = z.PQ();
        const int64_t JPQ = int64_t{J} * PQ, row = targets * JRQ;
        Buffer target(N * row), parts(c.shared ? chunks.count * JPQ : 1);  // [N][grad, state of each round][JRQ]
        for (int k = 0; k < g.K; ++k) {
            spread(g.grads[k], N, JRQ, target.floats() + 2 * k * JRQ, row);
            spread(g.states[k], N, JRQ, target.floats() + (2 * k + 1) * JRQ, row);
        }
        if (!c.shared) expect_writing(g.d_weight, c.I * JPQ);
        parallel_for(chunks.count, threads, [&](int64_t chunk) {
            const int64_t votes_size = int64_t{N} * RQ;
            const Scratch scratch({int64_t{N} * RP, int64_t{N} * RP, int64_t{PQ}, c.shared ? JPQ : PQ, int64_t{N} * targets * J, int64_t{N} * J,
                                   int64_t{J}, int64_t{J}, int64_t{N} * RQ, c.cosine ? J * votes_size : votes_size});
            const auto [x, dx, w, dw, slots, inverse, spare, dp, du, all_votes] = scratch.parts;
            if (c.shared) std::fill(dw, dw + JPQ, vf{});
            for (int64_t b = chunk * chunks.length; b < std::min((chunk + 1) * chunks.length, blocks); ++b) {
                const Block block(c, b);
                block.load_poses(x);
                for (int j = 0; j < J; ++j) {
                    block.load_weight(j, w);
                    votes(j, x, w, targets, target.floats(), all_votes + (c.cosine ? j * votes_size : 0), slots, inverse);
                }
                const vf* prior = block.load_prior(spare);
                std::fill(dp, dp + J, vf{});
                for (int n = 0; n < N; ++n) {
                    vf* own = slots + int64_t{n} * targets * J;
                    couple(c, targets, own, prior, inverse + int64_t{n} * J);
                    for (int r = 1; r < targets; r += 2)
                        for (int j = 0; j < J; ++j) dp[j] += own[r * J + j];
                }
                std::fill(dx, dx + N * RP, vf{});
                for (int j = 0; j < J; ++j) {
                    vf* dwj = dw + (c.shared ? int64_t{j} * PQ : 0);
                    block.load_weight(j, w);
                    if (!c.shared) std::fill(dwj, dwj + PQ, vf{});
                    gradients(j, x, w, g.K, target.floats(), g.uniform, all_votes + (c.cosine ? j * votes_size : 0), slots, inverse, du, dx, dwj);
                    if (!c.shared) lanes_to_rows(dwj, block.m, PQ, g.d_weight + (block.i * J + j) * PQ, JPQ);
                }
                for (int n = 0; n < N; ++n) lanes_to_rows(dx + n * RP, block.m, RP, g.d_poses + (n * c.I + block.i) * RP, RP);
                if (g.d_prior != nullptr) lanes_to_rows(dp, block.m, J, g.d_prior + block.i * J, J);
            }
            if (c.shared) sum_lanes_each(dw, JPQ, parts.floats() + chunk * JPQ);
        });
        if (c.shared) add_parts(parts.floats(), chunks.count, JPQ, g.d_weight);
    }
};

}  // namespace

void deep_pass(const tc_connected& c, const float* state, const float* grad, float* out) {
    Deep{c}.pass(state, grad, out);
}

void deep_full(const tc_connected& c, const Gradients& g) {
    Deep{c}.full(g);
}

}  // namespace torchcaps
