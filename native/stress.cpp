// Every pass at odd sizes, from several threads at once, without Python: what the sanitizers run (sanitize.sh).
//
// Tensors are heap blocks of exactly their size, so that a read beyond one is seen. Results of one and of several threads
// must be equal bit for bit, and finite.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "csrc/torchcaps_native.h"

namespace {

using Block = std::vector<float>;

struct Draw {
    std::mt19937 generator;
    int size(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }
    bool coin() { return size(0, 1) == 1; }
    Block block(size_t count) {
        Block made(count);
        std::normal_distribution<float> normal;
        for (float& x : made) x = normal(generator);
        return made;
    }
};

int failures = 0;

void expect(bool held, const char* what) {
    if (!held) {
        std::printf("FAILED: %s\n", what);
        ++failures;
    }
}

bool finite(const Block& block) {
    for (float x : block)
        if (!std::isfinite(x)) return false;
    return true;
}

bool same(const Block& a, const Block& b) { return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0; }

float* data(Block& block) { return block.empty() ? nullptr : block.data(); }

// Runs all four passes of a problem with some threads and returns everything they wrote.
template <class Problem, class Sum, class Forward, class State, class Full>
std::vector<Block> run(Problem problem, int threads, int K, size_t parents, size_t poses, size_t weight, size_t prior,
                       const Block& states, const Block& grads, Block& uniform, Sum sum, Forward forward, State state,
                       Full full) {
    problem.threads = threads;
    std::vector<Block> out{Block(parents), Block(parents), Block(parents), Block(poses), Block(weight), Block(prior)};
    expect(sum(&problem, data(out[0])) == 0, "sum returns 0");
    expect(forward(&problem, states.data(), data(out[1])) == 0, "forward returns 0");
    expect(state(&problem, states.data(), grads.data(), data(out[2])) == 0, "backward_state returns 0");
    std::vector<const float*> each_state, each_grad;
    for (int k = 0; k < K; ++k) each_state.push_back(states.data() + k * parents), each_grad.push_back(grads.data() + k * parents);
    expect(full(&problem, K, each_state.data(), each_grad.data(), data(uniform), data(out[3]), data(out[4]), data(out[5])) == 0,
           "backward_full returns 0");
    return out;
}

void compare(const std::vector<Block>& one, const std::vector<Block>& several, const char* what) {
    for (size_t k = 0; k < one.size(); ++k) {
        expect(finite(one[k]), what);
        expect(same(one[k], several[k]), what);
    }
}

void connected(Draw& draw, int threads) {
    tc_connected c{};
    const int shapes[][3] = {{1, 8, 16}, {4, 4, 4}, {1, 16, 16}, {2, 3, 5}, {1, 1, 1}, {8, 8, 8}, {1, 7, 33}};
    const int* shape = shapes[draw.size(0, 6)];
    c.N = draw.size(1, 40), c.I = draw.size(1, 70), c.J = draw.size(1, 20);
    c.R = shape[0], c.P = shape[1], c.Q = shape[2];
    c.shared = draw.coin(), c.leaky = draw.coin(), c.cosine = draw.coin();
    const int K = draw.size(1, 4);
    const size_t parents = c.N * c.J * c.R * c.Q, weights = (c.shared ? 1 : c.I) * c.J * c.P * c.Q;
    Block poses = draw.block(c.N * c.I * c.R * c.P), weight = draw.block(weights);
    Block prior = draw.block(draw.coin() ? c.I * c.J : 0), uniform = draw.block(draw.coin() ? parents : 0);
    Block states = draw.block(K * parents), grads = draw.block(K * parents);
    c.poses = poses.data(), c.weight = weight.data(), c.prior = data(prior);
    auto with = [&](int n) {
        return run(c, n, K, parents, poses.size(), weights, prior.size(), states, grads, uniform, tc_connected_sum,
                   tc_connected_forward, tc_connected_backward_state, tc_connected_backward_full);
    };
    compare(with(1), with(threads), "connected: finite, and equal for every number of threads");
}

void map(Draw& draw, int threads) {
    tc_map c{};
    const int shapes[][3] = {{4, 4, 4}, {1, 8, 16}, {2, 3, 5}, {1, 1, 1}};
    const int* shape = shapes[draw.size(0, 3)];
    c.N = draw.size(1, 4), c.C = draw.size(1, 5), c.J = draw.size(1, 35);
    c.R = shape[0], c.P = shape[1], c.Q = shape[2];
    c.kernel_h = draw.size(1, 3), c.kernel_w = draw.size(1, 3), c.stride_h = draw.size(1, 3), c.stride_w = draw.size(1, 3);
    c.padding_h = draw.size(0, 2), c.padding_w = draw.size(0, 2);
    c.H = draw.size(3, 8), c.W = draw.size(3, 8);
    c.out_h = (c.H + 2 * c.padding_h - c.kernel_h) / c.stride_h + 1;
    c.out_w = (c.W + 2 * c.padding_w - c.kernel_w) / c.stride_w + 1;
    c.leaky = draw.coin(), c.cosine = draw.coin();
    const int K = draw.size(1, 3);
    const size_t I = c.C * c.kernel_h * c.kernel_w, parents = c.N * c.out_h * c.out_w * c.J * c.R * c.Q;
    Block poses = draw.block(c.N * c.C * c.H * c.W * c.R * c.P), weight = draw.block(I * c.J * c.P * c.Q);
    Block prior = draw.block(draw.coin() ? I * c.J : 0), uniform = draw.block(draw.coin() ? parents : 0);
    Block states = draw.block(K * parents), grads = draw.block(K * parents);
    c.poses = poses.data(), c.weight = weight.data(), c.prior = data(prior);
    auto with = [&](int n) {
        return run(c, n, K, parents, poses.size(), weight.size(), prior.size(), states, grads, uniform, tc_map_sum,
                   tc_map_forward, tc_map_backward_state, tc_map_backward_full);
    };
    compare(with(1), with(threads), "map: finite, and equal for every number of threads");
}

void folded(Draw& draw, int threads) {
    tc_folded c{};
    c.N = draw.size(1, 9), c.I = draw.size(1, 90), c.J = draw.size(1, 20), c.D = draw.size(1, 70), c.leaky = draw.coin();
    const int K = draw.size(1, 3);
    const size_t parents = c.N * c.J * c.D;
    Block poses = draw.block(c.N * c.I * c.D), prior = draw.block(draw.coin() ? c.I * c.J : 0);
    Block uniform = draw.block(draw.coin() ? c.N * c.D : 0), queries = draw.block(K * parents), grads = draw.block(K * parents);
    c.poses = poses.data(), c.prior = data(prior);
    auto with = [&](int n) {
        c.threads = n;
        std::vector<Block> out{Block(parents), Block(parents), Block(poses.size()), Block(prior.size()), Block(K * parents),
                               Block(K * parents)};
        expect(tc_folded_forward(&c, queries.data(), data(out[0])) == 0, "forward returns 0");
        expect(tc_folded_backward_state(&c, queries.data(), grads.data(), data(out[1])) == 0, "backward_state returns 0");
        expect(tc_folded_backward_full(&c, K, queries.data(), grads.data(), data(uniform), data(out[2]), data(out[3]),
                                       data(out[4]), data(out[5])) == 0, "backward_full returns 0");
        return out;
    };
    compare(with(1), with(threads), "folded: finite, and equal for every number of threads");
}

}  // namespace

int main(int count, char** arguments) {
    const int rounds = count > 1 ? std::atoi(arguments[1]) : 40;
    for (int round = 0; round < rounds; ++round) {
        Draw draw{std::mt19937(round)};
        const int threads = draw.size(2, 4);
        connected(draw, threads), map(draw, threads), folded(draw, threads);
    }
    std::vector<std::thread> callers;  // several callers share the pool
    for (int caller = 0; caller < 3; ++caller)
        callers.emplace_back([=] {
            for (int round = 0; round < rounds / 4; ++round) {
                Draw draw{std::mt19937(1000 + 100 * caller + round)};
                connected(draw, 2), map(draw, 3), folded(draw, 4);
            }
        });
    for (std::thread& caller : callers) caller.join();
    std::printf("%d lanes, %d rounds, %d failures\n", tc_lanes(), rounds, failures);
    return failures != 0;
}
