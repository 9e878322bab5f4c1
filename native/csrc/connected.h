// Fully connected capsules: two arrangements of the same passes, which torchcaps_native.h describes.
//
//   wide   lanes = rows of the batch. Weights are scalars read in place; poses are turned tile by tile.
//   deep   lanes = children, for small batches. The weights of LANES children are turned parent by parent.
//
// Sums over children are cut into chunks that depend on the sizes alone, and every output has one owner: results are bitwise
// the same for every thread count.
#pragma once
#include "kernels.h"
#include "parallel.h"
#include "votes.h"

namespace torchcaps {

// `children` (or blocks of them) in `count` chunks of `length`: enough to share out, few enough to add up cheaply
struct Chunks {
    int64_t length, count;
    Chunks(int64_t children, int64_t wanted, int64_t multiple) {
        wanted = std::max<int64_t>(1, std::min<int64_t>(wanted, 16));
        length = ceil_div(ceil_div(children, wanted), multiple) * multiple;
        count = ceil_div(children, length);
    }
};

// The slots of one child, [targets][J], hold its votes' products with the state alone, or with grad and state of each round.
// They become its couplings c, or c and d of each round.
template <class Prior>
void couple(const tc_connected& c, int targets, vf* slots, const Prior* prior, const vf* inverse) {
    const int J = static_cast<int>(c.J), pair = std::min(targets, 2);
    for (int t = 0; t < targets; t += pair) {
        vf *g = slots + int64_t{t} * J, *b = g + int64_t{pair - 1} * J;
        if (c.cosine)
            for (int j = 0; j < J; ++j) b[j] *= inverse[j];
        if (prior != nullptr)
            for (int j = 0; j < J; ++j) b[j] += prior[j];
        softmax(b, J, c.leaky);
        if (pair == 2) softmax_backward(b, g, J, inner(b, g, J));
    }
}

}  // namespace torchcaps
