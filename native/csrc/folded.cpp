// Shared weights, folded: b_ij = <x_i W_j, state_j> = <x_i, state_j W_j^T>, so routing is attention over the children with
// J queries and needs no votes. One block of children at a time: turned (lanes = children) for the logits, in rows
// (lanes = entries of the pose) for sums over children and for the gradient of the poses.
#include <algorithm>
#include <new>

#include "parallel.h"
#include "torchcaps_native.h"
#include "votes.h"

namespace torchcaps {
namespace {

using Problem = tc_folded;

constexpr int PAIR = 2;               // vectors of children, and of pose entries, side by side
constexpr int BLOCK = PAIR * LANES;   // children of one block
constexpr int GROUP = 5;              // parents side by side: GROUP * PAIR sums live in registers

template <int N, class Run>
TC_INLINE void groups_of(int count, Run&& run) {  // run(constant size, start) for sizes N, N, .., then the rest
    int at = 0;
    for (; at + N <= count; at += N) run(std::integral_constant<int, N>{}, at);
    if constexpr (N > 1) {
        for (; at < count; ++at) run(std::integral_constant<int, 1>{}, at);
    }
}

struct Block {
    const Problem& c;
    int64_t width;  // D rounded up to whole vectors
    float* rows;    // [BLOCK][width], zeros behind the last child and the last entry
    vf* turned;     // [D][PAIR]

    static int64_t padded(const Problem& c) { return ceil_div(c.D, LANES) * LANES; }
    static int64_t vectors(const Problem& c) { return BLOCK * padded(c) / LANES + c.D * PAIR; }
    Block(const Problem& problem, Scratch& scratch)
        : c(problem), width(padded(problem)), rows(reinterpret_cast<float*>(scratch.vectors(BLOCK * width / LANES))),
          turned(scratch.vectors(c.D * PAIR)) {}

    void load(int64_t n, int64_t i, int children) {
        const int D = static_cast<int>(c.D);
        const float* from = c.poses + (n * c.I + i) * D;
        for (int k = 0; k < BLOCK; ++k) {
            float* row = rows + k * width;
            if (k < children) {
                std::memcpy(row, from + int64_t{k} * D, sizeof(float) * D);
                std::fill(row + D, row + width, 0.0f);
            } else {
                std::fill(row, row + width, 0.0f);
            }
        }
        transpose(rows, width, BLOCK, D, reinterpret_cast<float*>(turned), BLOCK);
    }

    // out[j][PAIR] = <x, query_j>
    void products(const float* query, int J, vf* out) const {
        const int D = static_cast<int>(c.D);
        groups_of<GROUP>(J, [&](auto size, int j) {
            constexpr int G = decltype(size)::value;
            vf sum[G][PAIR];
            for (int g = 0; g < G; ++g)
                for (int h = 0; h < PAIR; ++h) sum[g][h] = vf{};
            const float* q = query + int64_t{j} * D;
            for (int k = 0; k < D; ++k) {
                const vf x0 = turned[k * PAIR], x1 = turned[k * PAIR + 1];
#pragma GCC unroll 8
                for (int g = 0; g < G; ++g) {
                    const float qk = q[int64_t{g} * D + k];
                    sum[g][0] += qk * x0;
                    sum[g][1] += qk * x1;
                }
            }
            for (int g = 0; g < G; ++g)
                for (int h = 0; h < PAIR; ++h) out[(j + g) * PAIR + h] = sum[g][h];
        });
    }

    // to[j][width] += sum over the children of weights[j][child] x
    void sums(const vf* weights, int J, float* to) const {
        const float* share = reinterpret_cast<const float*>(weights);
        const auto columns = [&](auto vectors, int64_t k) __attribute__((always_inline)) {
            constexpr int V = decltype(vectors)::value;
            groups_of<GROUP>(J, [&](auto size, int j) {
                constexpr int G = decltype(size)::value;
                vf sum[G][V];
                for (int g = 0; g < G; ++g)
                    for (int h = 0; h < V; ++h) sum[g][h] = vf{};
                for (int child = 0; child < BLOCK; ++child) {
                    vf x[V];
#pragma GCC unroll 2
                    for (int h = 0; h < V; ++h) x[h] = load_vector(rows + child * width + k + h * LANES);
#pragma GCC unroll 8
                    for (int g = 0; g < G; ++g) {
                        const float s = share[(j + g) * BLOCK + child];
#pragma GCC unroll 2
                        for (int h = 0; h < V; ++h) sum[g][h] += s * x[h];
                    }
                }
                for (int g = 0; g < G; ++g)
                    for (int h = 0; h < V; ++h) {
                        float* at = to + (j + g) * width + k + h * LANES;
                        store<LANES>(at, load_vector(at) + sum[g][h]);
                    }
            });
        };
        int64_t k = 0;
        for (; k + 2 * LANES <= width; k += 2 * LANES) columns(std::integral_constant<int, 2>{}, k);
        if (k < width) columns(std::integral_constant<int, 1>{}, k);
    }

    static TC_INLINE vf load_vector(const float* p) { return torchcaps::load<LANES>(p); }
};

struct Couplings {
    const Problem& c;
    vf *share, *pull, *one, *prior;  // share, pull [J][PAIR]; one: a column [J] of either, twice

    static int64_t vectors(const Problem& c) { return c.J * (2 * PAIR + 2 + 1); }
    Couplings(const Problem& problem, Scratch& scratch)
        : c(problem), share(scratch.vectors(c.J * PAIR)), pull(scratch.vectors(c.J * PAIR)), one(scratch.vectors(2 * c.J)),
          prior(scratch.vectors(c.J)) {}

    // logits in `b` become couplings c; products in `g`, where there are any, become d
    void finish(int64_t n, int64_t i, int children, vf* b, vf* g) {
        const int J = static_cast<int>(c.J);
        for (int h = 0; h < PAIR; ++h) {
            const int m = std::min(LANES, children - h * LANES);
            if (m <= 0) {
                for (int j = 0; j < J; ++j) {
                    b[j * PAIR + h] = vf{};
                    if (g != nullptr) g[j * PAIR + h] = vf{};
                }
                continue;
            }
            vf *cs = one, *ds = one + J;
            for (int j = 0; j < J; ++j) cs[j] = b[j * PAIR + h];
            if (c.prior != nullptr) {
                rows_to_lanes(c.prior + (i + h * LANES) * J, J, m, J, prior);
                for (int j = 0; j < J; ++j) cs[j] += prior[j];
            }
            vf take{};
            for (int l = 0; l < m; ++l) take[l] = c.mask == nullptr || c.mask[n * c.I + i + h * LANES + l] ? 1.0f : 0.0f;
            softmax(cs, J, c.leaky);
            if (g != nullptr) {
                for (int j = 0; j < J; ++j) ds[j] = g[j * PAIR + h];
                softmax_backward(cs, ds, J);
                for (int j = 0; j < J; ++j) g[j * PAIR + h] = ds[j] * take;
            }
            for (int j = 0; j < J; ++j) b[j * PAIR + h] = cs[j] * take;
        }
    }
};

template <bool BACKWARD>
void pass(const Problem& c, const float* query, const float* grad, float* out) {
    const int64_t D = c.D, width = Block::padded(c), JW = c.J * width;
    const int J = static_cast<int>(c.J), threads = static_cast<int>(c.threads);
    // chunks of children depend on the sizes alone
    const int64_t blocks = ceil_div(c.I, BLOCK), wanted = std::max<int64_t>(1, std::min<int64_t>(ceil_div(16, c.N), blocks));
    const int64_t length = ceil_div(blocks, wanted) * BLOCK, chunks = ceil_div(c.I, length);
    Buffer partial(c.N * chunks * JW);
    parallel_for(c.N * chunks, threads, [&](int64_t task) {
        const int64_t n = task / chunks, begin = task % chunks * length, end = std::min(begin + length, c.I);
        Scratch scratch(Block::vectors(c) + Couplings::vectors(c));
        Block block(c, scratch);
        Couplings couple(c, scratch);
        float* to = partial.floats() + task * JW;
        std::fill(to, to + JW, 0.0f);
        for (int64_t i = begin; i < end; i += BLOCK) {
            const int children = static_cast<int>(std::min<int64_t>(BLOCK, end - i));
            block.load(n, i, children);
            block.products(query + n * c.J * D, J, couple.share);
            if (BACKWARD) block.products(grad + n * c.J * D, J, couple.pull);
            couple.finish(n, i, children, couple.share, BACKWARD ? couple.pull : nullptr);
            block.sums(BACKWARD ? couple.pull : couple.share, J, to);
        }
    });
    for (int64_t n = 0; n < c.N; ++n)
        for (int64_t j = 0; j < c.J; ++j) {
            float* to = out + (n * c.J + j) * D;
            for (int64_t k = 0; k < D; ++k) {
                float total = 0.0f;
                for (int64_t chunk = 0; chunk < chunks; ++chunk)
                    total += partial.floats()[(n * chunks + chunk) * JW + j * width + k];
                to[k] = total;
            }
        }
}

// d_poses[child] = take * uniform + sum_r weights[r][child] queries[r], r over all rounds, couplings and parents
void gradient(const Problem& c, const vf* weights, int count, const float* queries, int64_t width, const float* uniform,
              const float* take, int children, float* to) {
    const float* share = reinterpret_cast<const float*>(weights);
    const auto tile = [&](auto kids, auto vectors, int child, int64_t k) __attribute__((always_inline)) {
        constexpr int G = decltype(kids)::value, V = decltype(vectors)::value;
        vf sum[G][V];
        for (int g = 0; g < G; ++g)
            for (int h = 0; h < V; ++h)
                sum[g][h] = uniform == nullptr ? vf{} : take[child + g] * load<LANES>(uniform + k + h * LANES);
        const float* q = queries + k;
        for (int r = 0; r < count; ++r, q += width) {
            vf x[V];
#pragma GCC unroll 2
            for (int h = 0; h < V; ++h) x[h] = load<LANES>(q + h * LANES);
#pragma GCC unroll 8
            for (int g = 0; g < G; ++g) {
                const float s = share[r * BLOCK + child + g];
#pragma GCC unroll 2
                for (int h = 0; h < V; ++h) sum[g][h] += s * x[h];
            }
        }
        for (int g = 0; g < G; ++g)
            for (int h = 0; h < V; ++h) {
                float* at = to + (child + g) * c.D + k + h * LANES;
                const int64_t left = c.D - (k + h * LANES);
                if (left >= LANES) store<LANES>(at, sum[g][h]);
                else std::memcpy(at, &sum[g][h], sizeof(float) * static_cast<std::size_t>(left));
            }
    };
    int64_t k = 0;
    for (; k + 2 * LANES <= width; k += 2 * LANES)
        groups_of<GROUP>(children, [&](auto size, int child) { tile(size, std::integral_constant<int, 2>{}, child, k); });
    if (k < width)
        groups_of<GROUP>(children, [&](auto size, int child) { tile(size, std::integral_constant<int, 1>{}, child, k); });
}

void full(const Problem& c, int64_t K, const float* queries, const float* grads, const float* uniform, float* d_poses,
          float* d_prior) {
    const int64_t D = c.D, width = Block::padded(c), JD = c.J * D, blocks = ceil_div(c.I, BLOCK);
    const int J = static_cast<int>(c.J), count = static_cast<int>(2 * K * c.J);
    const int64_t span = ceil_div(blocks, std::min<int64_t>(blocks, 16)), spans = ceil_div(blocks, span);
    Buffer padded(c.N * (count + 1) * width);  // [N][round][grad, query][J][width], then uniform
    std::fill(padded.floats(), padded.floats() + c.N * (count + 1) * width, 0.0f);
    for (int64_t n = 0; n < c.N; ++n) {
        float* to = padded.floats() + n * (count + 1) * width;
        for (int64_t k = 0; k < K; ++k)
            for (int64_t j = 0; j < c.J; ++j) {
                std::memcpy(to + (2 * k * c.J + j) * width, grads + (k * c.N + n) * JD + j * D, sizeof(float) * D);
                std::memcpy(to + ((2 * k + 1) * c.J + j) * width, queries + (k * c.N + n) * JD + j * D, sizeof(float) * D);
            }
        if (uniform != nullptr) std::memcpy(to + count * width, uniform + n * D, sizeof(float) * D);
    }
    // The gradient of the prior sums over the batch: one owner for a span of children. Without it a task is a row as well.
    const int64_t rows = d_prior == nullptr ? c.N : 1;
    parallel_for(rows * spans, static_cast<int>(c.threads), [&](int64_t task) {
        const int64_t first = d_prior == nullptr ? task / spans : 0, last = d_prior == nullptr ? first + 1 : c.N;
        Scratch scratch(Block::vectors(c) + Couplings::vectors(c) + count * PAIR + c.J * PAIR + PAIR);
        Block block(c, scratch);
        Couplings couple(c, scratch);
        vf* weights = scratch.vectors(count * PAIR);
        vf* dp = scratch.vectors(c.J * PAIR);
        float* take = reinterpret_cast<float*>(scratch.vectors(PAIR));
        for (int64_t b = task % spans * span; b < std::min((task % spans + 1) * span, blocks); ++b) {
            const int64_t i = b * BLOCK;
            const int children = static_cast<int>(std::min<int64_t>(BLOCK, c.I - i));
            for (int64_t e = 0; e < c.J * PAIR; ++e) dp[e] = vf{};
            for (int64_t n = first; n < last; ++n) {
                const float* own = padded.floats() + n * (count + 1) * width;
                block.load(n, i, children);
                for (int64_t k = 0; k < K; ++k) {
                    vf *b_ = weights + 2 * k * c.J * PAIR, *g = b_ + c.J * PAIR;
                    block.products(queries + (k * c.N + n) * JD, J, b_);
                    block.products(grads + (k * c.N + n) * JD, J, g);
                    couple.finish(n, i, children, b_, g);
                    for (int64_t e = 0; e < c.J * PAIR; ++e) dp[e] += g[e];
                }
                for (int l = 0; l < children; ++l) take[l] = c.mask == nullptr || c.mask[n * c.I + i + l] ? 1.0f : 0.0f;
                gradient(c, weights, count, own, width, uniform == nullptr ? nullptr : own + count * width, take, children,
                         d_poses + (n * c.I + i) * D);
            }
            if (d_prior != nullptr)
                transpose(reinterpret_cast<const float*>(dp), BLOCK, J, children, d_prior + i * J, J);
        }
    });
}

}  // namespace
}  // namespace torchcaps

extern "C" {

int tc_folded_forward(const tc_folded* c, const float* query, float* t) {
    try {
        torchcaps::pass<false>(*c, query, nullptr, t);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

int tc_folded_backward_state(const tc_folded* c, const float* query, const float* grad, float* y) {
    try {
        torchcaps::pass<true>(*c, query, grad, y);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

int tc_folded_backward_full(const tc_folded* c, int64_t K, const float* queries, const float* grads, const float* uniform,
                            float* d_poses, float* d_prior) {
    try {
        torchcaps::full(*c, K, queries, grads, uniform, d_poses, d_prior);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
}
