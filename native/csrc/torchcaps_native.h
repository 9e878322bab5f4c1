// The C interface of the native kernels. Plain pointers to contiguous float32 memory; nothing is kept between calls.
//
//   N batch, I children, J parents, R rows of a pose, P / Q columns below / above.
//   u_ij = x_i W_ij             votes, recomputed in registers, never stored for more than a few children
//   b_ij = prior_ij + <u_ij, state_j>              (cosine: <u_ij / |u_ij|, state_j>, 0 where |u_ij| = 0)
//   c_ij = softmax_j b_ij                          (leaky: with one more logit 0 whose share is dropped)
//
// Every function returns 0, or 1 when memory ran out.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define TC_EXPORT __declspec(dllexport)
#else
#define TC_EXPORT __attribute__((visibility("default")))
#endif

typedef struct {
    int64_t N, I, J, R, P, Q;
    int64_t shared;        // 1: weight [1, J, P, Q] serves every child; 0: weight [I, J, P, Q]
    int64_t leaky, cosine;
    int64_t threads;
    const float* poses;    // [N, I, R, P]
    const float* weight;
    const float* prior;    // [I, J] or null
} tc_connected;

// s_j = sum_i u_ij a first round, but for its equal coupling 1 / J        [N, J, R, Q]
TC_EXPORT int tc_connected_sum(const tc_connected*, float* s);
// s_j = sum_i c_ij u_ij                                                                  state, s [N, J, R, Q]
TC_EXPORT int tc_connected_forward(const tc_connected*, const float* state, float* s);
// d_state_j = sum_i d_ij u_ij with g_ij = <u_ij, grad_j>, d_ij = c_ij (g_ij - sum_k c_ik g_ik)
TC_EXPORT int tc_connected_backward_state(const tc_connected*, const float* state, const float* grad, float* d_state);
// du_ij = uniform_j + sum_k c^k_ij grad^k_j + d^k_ij state^k_j, contracted at once with W_ij^T and x_i^T.
// states, grads: K times [N, J, R, Q]; uniform [N, J, R, Q] or null; d_poses like poses, d_weight like weight;
// d_prior [I, J] or null
TC_EXPORT int tc_connected_backward_full(const tc_connected*, int64_t K, const float* const* states, const float* const* grads,
                                         const float* uniform, float* d_poses, float* d_weight, float* d_prior);

typedef struct {
    int64_t N, C, H, W;              // batch, capsule types below, rows and columns of the map
    int64_t J, R, P, Q;
    int64_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w;
    int64_t out_h, out_w;
    int64_t leaky, cosine;
    int64_t threads;
    const float* poses;              // [N, C, H, W, R, P]
    const float* weight;             // [C * kernel_h * kernel_w, J, P, Q]
    const float* prior;              // [C * kernel_h * kernel_w, J] or null
} tc_map;

// The same passes for every window of a map; states, grads and results [N, out_h * out_w, J, R, Q].
TC_EXPORT int tc_map_sum(const tc_map*, float* s);
TC_EXPORT int tc_map_forward(const tc_map*, const float* state, float* s);
TC_EXPORT int tc_map_backward_state(const tc_map*, const float* state, const float* grad, float* d_state);
TC_EXPORT int tc_map_backward_full(const tc_map*, int64_t K, const float* const* states, const float* const* grads,
                                   const float* uniform, float* d_poses, float* d_weight, float* d_prior);

typedef struct {
    int64_t N, I, J, D;    // D = R * P
    int64_t leaky;
    int64_t threads;
    const float* poses;    // [N, I, D]
    const float* prior;    // [I, J] or null
} tc_folded;

// sum_i x_i                                                                                            [N, D]
TC_EXPORT int tc_folded_sum(const tc_folded*, float* x);
// Shared weights folded into J queries: b_ij = prior_ij + <x_i, query_j>;  t_j = sum_i c_ij x_i       [N, J, D]
TC_EXPORT int tc_folded_forward(const tc_folded*, const float* query, float* t);
// y_j = sum_i d_ij x_i with g_ij = <x_i, grad_j>
TC_EXPORT int tc_folded_backward_state(const tc_folded*, const float* query, const float* grad, float* y);
// d_poses_i = uniform + sum_k,j c^k_ij grad^k_j + d^k_ij query^k_j; queries, grads [K, N, J, D]; uniform [N, D] or null;
// t, y [K, N, J, D] are the sums of the other two, of which the gradient of the weight is made
TC_EXPORT int tc_folded_backward_full(const tc_folded*, int64_t K, const float* queries, const float* grads,
                                      const float* uniform, float* d_poses, float* d_prior, float* t, float* y);

TC_EXPORT int tc_lanes(void);    // floats in a vector of this build
TC_EXPORT int tc_version(void);  // of this interface

#ifdef __cplusplus
}
#endif
