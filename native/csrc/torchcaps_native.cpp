// The C interface: chooses the arrangement, and turns want of memory into a return value.
#include "torchcaps_native.h"

#include <new>

#include "kernels.h"
#include "parallel.h"

using namespace torchcaps;

namespace {

// Work of the two arrangements in units of one full vector: turning the weights costs deep as much as four rows.
bool use_deep(const tc_connected& c) {
    const double wide = double(ceil_div(c.N, LANES) * LANES);
    const double deep = (c.N * 1.2 + 4) * double(ceil_div(c.I, LANES) * LANES) / double(c.I);
    return c.N <= 2 * LANES && deep < wide;
}

template <class Run>
int guarded(Run&& run) {
    try {
        run();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

int connected_pass(const tc_connected& c, const float* state, const float* grad, float* out) {
    return guarded([&] { (use_deep(c) ? deep_pass : wide_pass)(c, state, grad, out); });
}

}  // namespace

extern "C" {

int tc_connected_sum(const tc_connected* c, float* s) { return connected_pass(*c, nullptr, nullptr, s); }

int tc_connected_forward(const tc_connected* c, const float* state, float* s) { return connected_pass(*c, state, nullptr, s); }

int tc_connected_backward_state(const tc_connected* c, const float* state, const float* grad, float* d_state) {
    return connected_pass(*c, state, grad, d_state);
}

int tc_connected_backward_full(const tc_connected* c, int64_t K, const float* const* states, const float* const* grads,
                               const float* uniform, float* d_poses, float* d_weight, float* d_prior) {
    const Gradients g{static_cast<int>(K), states, grads, uniform, d_poses, d_weight, d_prior};
    return guarded([&] { (use_deep(*c) ? deep_full : wide_full)(*c, g); });
}

int tc_map_sum(const tc_map* c, float* s) {
    return guarded([&] { map_pass(*c, nullptr, nullptr, s); });
}

int tc_map_forward(const tc_map* c, const float* state, float* s) {
    return guarded([&] { map_pass(*c, state, nullptr, s); });
}

int tc_map_backward_state(const tc_map* c, const float* state, const float* grad, float* d_state) {
    return guarded([&] { map_pass(*c, state, grad, d_state); });
}

int tc_map_backward_full(const tc_map* c, int64_t K, const float* const* states, const float* const* grads,
                         const float* uniform, float* d_poses, float* d_weight, float* d_prior) {
    return guarded([&] { map_full(*c, {static_cast<int>(K), states, grads, uniform, d_poses, d_weight, d_prior}); });
}

int tc_folded_sum(const tc_folded* c, float* x) {
    return guarded([&] { folded_sum(*c, x); });
}

int tc_folded_forward(const tc_folded* c, const float* query, float* t) {
    return guarded([&] { folded_pass(*c, query, nullptr, t); });
}

int tc_folded_backward_state(const tc_folded* c, const float* query, const float* grad, float* y) {
    return guarded([&] { folded_pass(*c, query, grad, y); });
}

int tc_folded_backward_full(const tc_folded* c, int64_t K, const float* queries, const float* grads, const float* uniform,
                            float* d_poses, float* d_prior, float* t, float* y) {
    return guarded([&] { folded_full(*c, static_cast<int>(K), queries, grads, uniform, d_poses, d_prior, t, y); });
}

int tc_lanes(void) { return LANES; }
int tc_version(void) { return 4; }
}
