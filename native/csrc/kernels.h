// What the C interface (torchcaps_native.h) calls. All may throw std::bad_alloc.
#pragma once
#include "torchcaps_native.h"

namespace torchcaps {

struct Gradients {  // what goes into the backward of K rounds, and what comes out
    int K;
    const float *const *states, *const *grads;  // of each round
    const float* uniform;
    float *d_poses, *d_weight, *d_prior;
};

// A pass: sum_i u_ij without a state, sum_i c_ij u_ij with one, sum_i d_ij u_ij with a gradient too.
// wide: lanes = rows of the batch; deep: lanes = children, for small batches.
void wide_pass(const tc_connected&, const float* state, const float* grad, float* out);
void deep_pass(const tc_connected&, const float* state, const float* grad, float* out);
void map_pass(const tc_map&, const float* state, const float* grad, float* out);
void folded_sum(const tc_folded&, float* x);
void folded_pass(const tc_folded&, const float* query, const float* grad, float* out);

void wide_full(const tc_connected&, const Gradients&);
void deep_full(const tc_connected&, const Gradients&);
void map_full(const tc_map&, const Gradients&);
void folded_full(const tc_folded&, int K, const float* queries, const float* grads, const float* uniform, float* d_poses,
                 float* d_prior, float* t, float* y);

}  // namespace torchcaps
