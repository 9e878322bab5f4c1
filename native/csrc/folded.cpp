// Shared weights, folded: b_ij = <x_i W_j, state_j> = <x_i, state_j W_j^T>, so routing is attention over the children with
// J queries and needs no votes. One block of children at a time: turned (lanes = children) for the logits, in rows
// (lanes = entries of the pose) for sums over children and for the gradient of the poses.
#include "kernels.h"
#include "parallel.h"
#include "votes.h"

namespace torchcaps {
namespace {

constexpr int PACK = 2;              // vectors of children side by side
constexpr int BLOCK = PACK * LANES;  // children of one block

struct Fold {
    const tc_folded& c;
    const int J = static_cast<int>(c.J), D = static_cast<int>(c.D);
    const int columns = static_cast<int>(ceil_div(c.D, LANES)), width = columns * LANES;  // of a pose, in vectors and floats
    const int64_t blocks = ceil_div(c.I, BLOCK);
    const int threads = static_cast<int>(c.threads);
};

// to [D] += x [rows][D]
void add_rows(const float* x, int64_t rows, int D, float* to) {
    for (int64_t r = 0; r < rows; ++r, x += D)
        for (int k = 0; k < D; ++k) to[k] += x[k];
}

// One block of children of one example: their poses, and what they have to do with the queries.
struct Block {
    const Fold& f;
    vf* rows;    // [BLOCK][columns], zeros behind the last child and the last entry
    vf* turned;  // [D][PACK]
    vf* prior;   // [J], and [J] twice to work on
    int64_t n = 0, i = 0;
    int children = 0;

    static int64_t rows_size(const Fold& f) { return int64_t{BLOCK} * f.columns; }
    static int64_t turned_size(const Fold& f) { return int64_t{f.D} * PACK; }

    void load(int64_t example, int64_t block) {
        n = example;
        i = block * BLOCK;
        children = static_cast<int>(std::min<int64_t>(BLOCK, f.c.I - i));
        const float* from = f.c.poses + (n * f.c.I + i) * f.D;
        float* to = reinterpret_cast<float*>(rows);  // a copy even where none is needed: it asks memory for one line after the other
        for (int k = 0; k < BLOCK; ++k, to += f.width) {
            const int entries = k < children ? f.D : 0;
            std::copy_n(from + int64_t{k} * f.D, entries, to);
            std::fill(to + entries, to + f.width, 0.0f);
        }
        transpose(reinterpret_cast<const float*>(rows), f.width, BLOCK, f.D, reinterpret_cast<float*>(turned), BLOCK);
    }

    // out [J][PACK] = <x, query_j>
    __attribute__((noinline)) void products(const float* query, vf* out) const {
        product_into(f.J, f.D, PACK, Matrix<float>{query, f.D, 1}, Matrix<vf>{turned, PACK, 1}, out);
    }

    // to [J][columns] += sum over the children of weights [J][child] x
    __attribute__((noinline)) void add_sums(const vf* weights, vf* to) const {
        product_onto(f.J, BLOCK, f.columns, Matrix<float>{reinterpret_cast<const float*>(weights), BLOCK, 1}, Matrix<vf>{rows, f.columns, 1}, to);
    }

    // Logits b [J][PACK] become couplings c. With products g they become, as a pair (g, b), c and d.
    void couple(vf* b, vf* g) const {
        const int J = f.J;
        vf *one = prior + J, *pull = one + J;
        for (int h = 0; h < PACK; ++h) {
            const int m = std::clamp(children - h * LANES, 0, LANES);
            for (int j = 0; j < J; ++j) one[j] = b[j * PACK + h];
            if (f.c.prior != nullptr && m > 0) {
                rows_to_lanes(f.c.prior + (i + h * LANES) * J, J, m, J, prior);
                for (int j = 0; j < J; ++j) one[j] += prior[j];
            }
            softmax(one, J, f.c.leaky);
            if (g != nullptr) {
                for (int j = 0; j < J; ++j) pull[j] = g[j * PACK + h];
                softmax_backward(one, pull, J, inner(one, pull, J));
                for (int j = 0; j < J; ++j) g[j * PACK + h] = pull[j];
            }
            for (int j = 0; j < J; ++j) b[j * PACK + h] = one[j];
        }
    }

    // to [child][D] = uniform + sum_r weights [r][child] queries [r][columns]: r runs over rounds, couplings and parents
    __attribute__((noinline)) void gradient(const vf* weights, int count, const vf* queries, const vf* uniform, float* to) const {
        product(children, count, f.columns, 1, Matrix<float>{reinterpret_cast<const float*>(weights), 1, BLOCK}, Matrix<vf>{queries, f.columns, 1},
                [&](int child, int column, vf value) __attribute__((always_inline)) {
                    value += uniform[column];
                    float* at = to + int64_t{child} * f.D + column * LANES;
                    const int left = f.D - column * LANES;
                    if (left >= LANES) store<LANES>(at, value);
                    else std::memcpy(at, &value, sizeof(float) * static_cast<std::size_t>(left));
                });
    }
};

}  // namespace

void folded_sum(const tc_folded& c, float* out) {
    const Fold f{c};
    parallel_for(c.N, f.threads, [&](int64_t n) {
        const Scratch scratch({int64_t{f.columns}});
        float *sum = reinterpret_cast<float*>(scratch.parts[0]), *total = out + n * f.D;
        std::fill(total, total + f.D, 0.0f);
        for (int64_t i = 0; i < c.I; i += SUM_BLOCK) {
            std::fill(sum, sum + f.D, 0.0f);
            add_rows(c.poses + (n * c.I + i) * f.D, std::min<int64_t>(SUM_BLOCK, c.I - i), f.D, sum);
            add_rows(sum, 1, f.D, total);
        }
    });
}

void folded_pass(const tc_folded& c, const float* query, const float* grad, float* out) {
    const Fold f{c};
    const int64_t JC = int64_t{f.J} * f.columns, JD = c.J * c.D;
    // chunks of blocks depend on the sizes alone
    const int64_t wanted = std::min(ceil_div(16, c.N), f.blocks), length = ceil_div(f.blocks, wanted), chunks = ceil_div(f.blocks, length);
    Buffer partial(c.N * chunks * JC * LANES);
    parallel_for(c.N * chunks, f.threads, [&](int64_t task) {
        const int64_t n = task / chunks, begin = task % chunks * length, end = std::min(begin + length, f.blocks);
        const Scratch scratch({Block::rows_size(f), Block::turned_size(f), 3 * c.J, c.J * PACK, c.J * PACK});
        const auto [rows, turned, prior, b, g] = scratch.parts;
        Block block{f, rows, turned, prior};
        vf* to = partial.vectors() + task * JC;
        std::fill(to, to + JC, vf{});
        for (int64_t at = begin; at < end; ++at) {
            block.load(n, at);
            block.products(query + n * JD, b);
            if (grad != nullptr) block.products(grad + n * JD, g);
            block.couple(b, grad != nullptr ? g : nullptr);
            block.add_sums(b, to);
        }
    });
    for (int64_t n = 0; n < c.N; ++n)
        for (int j = 0; j < f.J; ++j)
            for (int k = 0; k < f.D; ++k) {
                float total = 0.0f;
                for (int64_t chunk = 0; chunk < chunks; ++chunk)
                    total += reinterpret_cast<const float*>(partial.vectors() + (n * chunks + chunk) * JC + j * f.columns)[k];
                out[(n * f.J + j) * f.D + k] = total;
            }
}

void folded_full(const tc_folded& c, int K, const float* queries, const float* grads, const float* uniform, float* d_poses,
                 float* d_prior, float* t, float* y) {
    const Fold f{c};
    const int count = 2 * K * f.J;  // [N][round][grad, query][J][columns], then uniform; the sums t, y of a round come the same way
    const int64_t JC = int64_t{f.J} * f.columns, JD = c.J * c.D, per_example = (count + 1) * int64_t{f.columns};
    // The gradient of the prior sums over the batch: one owner for a span of children. Without it a task is an example as well.
    const int64_t span = ceil_div(f.blocks, std::min<int64_t>(f.blocks, d_prior == nullptr ? ceil_div(16, c.N) : 16)), spans = ceil_div(f.blocks, span);
    Buffer packed(c.N * per_example * LANES), parts(c.N * spans * 2 * K * JC * LANES);
    std::fill(packed.vectors(), packed.vectors() + c.N * per_example, vf{});
    std::fill(parts.vectors(), parts.vectors() + c.N * spans * 2 * K * JC, vf{});
    const auto pad = [&](const float* from, int64_t rows, vf* to) {
        for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * f.columns, from + r * f.D, sizeof(float) * f.D);
    };
    for (int64_t n = 0; n < c.N; ++n) {
        vf* to = packed.vectors() + n * per_example;
        for (int k = 0; k < K; ++k) {
            pad(grads + (k * c.N + n) * JD, f.J, to + 2 * k * JC);
            pad(queries + (k * c.N + n) * JD, f.J, to + (2 * k + 1) * JC);
        }
        if (uniform != nullptr) pad(uniform + n * f.D, 1, to + 2 * K * JC);
    }
    expect_writing(d_poses, c.N * c.I * c.D);
    const int64_t owners = d_prior == nullptr ? c.N : 1;
    parallel_for(owners * spans, f.threads, [&](int64_t task) {
        const int64_t first = d_prior == nullptr ? task / spans : 0, last = d_prior == nullptr ? first + 1 : c.N, at = task % spans;
        const Scratch scratch({Block::rows_size(f), Block::turned_size(f), 3 * c.J, int64_t{count} * PACK, c.J * PACK});
        const auto [rows, turned, prior, weights, dp] = scratch.parts;
        Block block{f, rows, turned, prior};
        for (int64_t b = at * span; b < std::min((at + 1) * span, f.blocks); ++b) {
            std::fill(dp, dp + c.J * PACK, vf{});
            for (int64_t n = first; n < last; ++n) {
                const vf* own = packed.vectors() + n * per_example;
                vf* sums = parts.vectors() + (n * spans + at) * 2 * K * JC;
                block.load(n, b);
                for (int k = 0; k < K; ++k) {
                    vf *g = weights + 2 * k * f.J * PACK, *logits = g + f.J * PACK;
                    block.products(grads + (k * c.N + n) * JD, g);
                    block.products(queries + (k * c.N + n) * JD, logits);
                    block.couple(logits, g);
                    for (int e = 0; e < f.J * PACK; ++e) dp[e] += logits[e];
                    block.add_sums(g, sums + 2 * k * JC);
                    block.add_sums(logits, sums + (2 * k + 1) * JC);
                }
                block.gradient(weights, count, own, own + count * f.columns, d_poses + (n * c.I + block.i) * f.D);
            }
            if (d_prior != nullptr)
                transpose(reinterpret_cast<const float*>(dp), BLOCK, f.J, static_cast<int>(std::min<int64_t>(BLOCK, c.I - b * BLOCK)), d_prior + b * BLOCK * f.J, f.J);
        }
    });
    for (int64_t n = 0; n < c.N; ++n)
        for (int r = 0; r < 2 * K; ++r)
            for (int j = 0; j < f.J; ++j) {
                float* to = (r % 2 == 0 ? t : y) + ((r / 2 * c.N + n) * f.J + j) * f.D;
                for (int k = 0; k < f.D; ++k) {
                    float total = 0.0f;
                    for (int64_t s = 0; s < spans; ++s)
                        total += reinterpret_cast<const float*>(parts.vectors() + ((n * spans + s) * 2 * K + r) * JC + j * f.columns)[k];
                    to[k] = total;
                }
            }
}

}  // namespace torchcaps
