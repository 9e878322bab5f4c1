// What the kernels are made of: small matrix products that stay in registers, inner products with the parents, softmax.
//
// A vote is a product of matrices, u = x W, and so are both of its gradients. Operands are vectors or scalars, at least one of
// them a vector; what the lanes stand for (rows of the batch, children, parents) is the caller's choice.
#pragma once
#include "simd.h"

namespace torchcaps {

template <int N>
constexpr std::integral_constant<int, N> constant{};

// ------------------------------------------------------------------------------------------------------------------ sizes

struct Pose {  // rows of a pose, columns below and above
    int R, P, Q;
    int RP() const { return R * P; }
    int RQ() const { return R * Q; }
    int PQ() const { return P * Q; }
};

template <int R_, int P_, int Q_>
struct Fixed {  // the same, known to the compiler
    static constexpr int R = R_, P = P_, Q = Q_;
    static constexpr int RP() { return R * P; }
    static constexpr int RQ() { return R * Q; }
    static constexpr int PQ() { return P * Q; }
};

template <class Problem>
Pose pose_of(const Problem& c) { return {static_cast<int>(c.R), static_cast<int>(c.P), static_cast<int>(c.Q)}; }

// use(z) with `pose`, or with that of `Known` that equals it: what the compiler knows is some 10 % faster
template <class... Known, class Use>
void with_pose(const Pose& pose, Use&& use) {
    const auto is = [&](auto z) { return pose.R == z.R && pose.P == z.P && pose.Q == z.Q; };
    if (!((is(Known{}) && (use(Known{}), true)) || ...)) use(pose);
}

// --------------------------------------------------------------------------------------------------------------- products

template <class T>
struct Matrix {  // entry (r, c) lies at data[r * row + c * column]; of several matrices the next lies `next` further
    const T* data;
    int64_t row, column, next = 0;
};

// use(r, c, value) for the ROWS x COLUMNS entries from (r0, c0) on of sum_m a_m b_m, over `many` matrices of `inner` columns
template <int ROWS, int COLUMNS, class A, class B, class Use>
TC_INLINE void product_block(int r0, int c0, int inner, int many, const Matrix<A>& a, const Matrix<B>& b, Use&& use) {
    vf sum[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) sum[r][c] = vf{};
    for (int m = 0; m < many; ++m) {
        const A* left = a.data + m * a.next + r0 * a.row;
        const B* right = b.data + m * b.next + c0 * b.column;
        for (int k = 0; k < inner; ++k) {
            B column[COLUMNS];
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; ++c) column[c] = right[k * b.row + c * b.column];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const A entry = left[r * a.row + k * a.column];
#pragma GCC unroll 8
                for (int c = 0; c < COLUMNS; ++c) sum[r][c] += entry * column[c];
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) use(r0 + r, c0 + c, sum[r][c]);
}

template <int ROWS, int COLUMNS, class A, class B, class Use>
TC_INLINE void product_strip(int r, int c, int columns, int inner, int many, const Matrix<A>& a, const Matrix<B>& b, Use&& use) {
    for (; c + COLUMNS <= columns; c += COLUMNS) product_block<ROWS, COLUMNS>(r, c, inner, many, a, b, use);
    if constexpr (COLUMNS > 1) product_strip<ROWS, COLUMNS / 2>(r, c, columns, inner, many, a, b, use);
}

// use(r, c, value) for every entry of sum_m a_m [rows, inner] b_m [inner, columns]
template <class A, class B, class Use>
TC_INLINE void product(int rows, int inner, int columns, int many, const Matrix<A> a, const Matrix<B> b, Use&& use) {
    constexpr int WIDE = LANES == 16 ? 4 : 2;  // 16 sums where there are 32 registers, 8 where there are 16
    int r = 0;
    for (; r + 4 <= rows; r += 4) product_strip<4, WIDE>(r, 0, columns, inner, many, a, b, use);
    for (; r + 2 <= rows; r += 2) product_strip<2, 4>(r, 0, columns, inner, many, a, b, use);
    if (r < rows) product_strip<1, 8>(r, 0, columns, inner, many, a, b, use);
}

template <class A, class B>
TC_INLINE void product_into(int rows, int inner, int columns, const Matrix<A> a, const Matrix<B> b, vf* to, int many = 1) {
    product(rows, inner, columns, many, a, b, [&](int r, int c, vf value) __attribute__((always_inline)) { to[r * columns + c] = value; });
}

template <class A, class B>
TC_INLINE void product_onto(int rows, int inner, int columns, const Matrix<A> a, const Matrix<B> b, vf* to, int many = 1) {
    product(rows, inner, columns, many, a, b, [&](int r, int c, vf value) __attribute__((always_inline)) { to[r * columns + c] += value; });
}

// ---------------------------------------------------------------------------------------- votes and the parents they meet

template <class T>
struct List {  // item i lies at data + i * stride
    T* data;
    int64_t stride;
    List from(int64_t item) const { return {data + item * stride, stride}; }
    List<const T> fixed() const { return {data, stride}; }
};

struct Slots {  // what belongs to item i (a child) and target t lies at data[i * item + t * target]
    vf* data;
    int64_t item, target;
    Slots from(int64_t t) const { return {data + t * target, item, target}; }
};

// slot (i, t) = <u_i, s_t> over `count` entries, of ITEMS votes and TARGETS targets
template <int ITEMS, int TARGETS, class S>
TC_INLINE void dots_of(int count, const List<const vf> u, const List<const S> s, const Slots to) {
    constexpr int CHAINS = ITEMS * TARGETS >= 4 ? 1 : 2;  // sums side by side hide the latency of one
    vf sum[ITEMS][TARGETS][CHAINS];
    const auto each = [&](auto&& use) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int i = 0; i < ITEMS; ++i)
#pragma GCC unroll 4
            for (int t = 0; t < TARGETS; ++t) use(i, t);
    };
    each([&](int i, int t) __attribute__((always_inline)) {
        for (int k = 0; k < CHAINS; ++k) sum[i][t][k] = vf{};
    });
    const auto add = [&](int e, int k) __attribute__((always_inline)) {
        each([&](int i, int t) __attribute__((always_inline)) { sum[i][t][k] += u.data[i * u.stride + e] * s.data[t * s.stride + e]; });
    };
    int e = 0;
    for (; e + 2 <= count; e += 2) {
        add(e, 0);
        add(e + 1, CHAINS - 1);
    }
    if (e < count) add(e, 0);
    each([&](int i, int t) __attribute__((always_inline)) {
        to.data[i * to.item + t * to.target] = CHAINS == 1 ? sum[i][t][0] : sum[i][t][0] + sum[i][t][CHAINS - 1];
    });
}

// The same for any number of targets.
template <int ITEMS, class S>
TC_INLINE void dots(int targets, int count, const List<const vf> u, const List<const S> s, const Slots to) {
    int t = 0;
    for (; t + 4 <= targets; t += 4) dots_of<ITEMS, 4>(count, u, s.from(t), to.from(t));
    for (; t + 2 <= targets; t += 2) dots_of<ITEMS, 2>(count, u, s.from(t), to.from(t));
    if (t < targets) dots_of<ITEMS, 1>(count, u, s.from(t), to.from(t));
}

// A vote u = x W, and its products with one or two targets while it is in registers.
template <int TARGETS, class Z, class A, class B, class S>
TC_INLINE void vote_of(const Z& z, const Matrix<A> x, const Matrix<B> w, const List<const S> s, vf* u, const Slots to) {
    vf even[TARGETS], odd[TARGETS];
    const S* from[TARGETS];
#pragma GCC unroll 4
    for (int t = 0; t < TARGETS; ++t) {
        even[t] = odd[t] = vf{};
        from[t] = s.data + t * s.stride;
        asm("" : "+r"(from[t]));  // one pointer for each, not one for each entry
    }
    product(z.R, z.P, z.Q, 1, x, w, [&](int r, int c, vf value) __attribute__((always_inline)) {
        const int e = r * z.Q + c;
        if (TARGETS < 4) u[e] = value;
#pragma GCC unroll 4
        for (int t = 0; t < TARGETS; ++t) {
            const vf more = value * from[t][e];
            if (TARGETS < 4 && c % 2 != 0) odd[t] += more;
            else even[t] += more;
        }
    });
#pragma GCC unroll 4
    for (int t = 0; t < TARGETS; ++t) to.data[t * to.target] = even[t] + odd[t];
}

// Votes of two children and their products with the targets: T of them where that is 1, 2 or 4, any number where T is 0.
// A walk is a function for each T: one for all would have no registers left.
template <int T, class Z, class A, class B, class S>
TC_INLINE void two_votes(const Z& z, const Matrix<A> x0, const Matrix<A> x1, const Matrix<B> w0, const Matrix<B> w1, int targets,
                         const List<const S> s, const List<vf> u, const Slots to) {
    if constexpr (T == 1 || T == 2 || T == 4) {
        vote_of<T>(z, x0, w0, s, u.data, to);
        vote_of<T>(z, x1, w1, s, u.data + u.stride, Slots{to.data + to.item, to.item, to.target});
    } else {
        product_into(z.R, z.P, z.Q, x0, w0, u.data);
        product_into(z.R, z.P, z.Q, x1, w1, u.data + u.stride);
        if constexpr (T == 4) dots_of<2, 4>(z.RQ(), u.fixed(), s, to);
        else dots<2>(targets, z.RQ(), u.fixed(), s, to);
    }
}

template <int ITEMS, int TARGETS, class S, class Base>
TC_INLINE void mix_of(int count, const Slots c, const List<const S> s, const List<Base> base, int base_step, const List<vf> to) {
    vf share[ITEMS][TARGETS];
#pragma GCC unroll 2
    for (int i = 0; i < ITEMS; ++i)
#pragma GCC unroll 4
        for (int t = 0; t < TARGETS; ++t) share[i][t] = c.data[i * c.item + t * c.target];
    const S* from[TARGETS];
#pragma GCC unroll 4
    for (int t = 0; t < TARGETS; ++t) from[t] = s.data + t * s.stride;
#pragma GCC unroll 4
    for (int e = 0; e < count; ++e) {
        S entry[TARGETS];
#pragma GCC unroll 4
        for (int t = 0; t < TARGETS; ++t) entry[t] = from[t][e];
#pragma GCC unroll 2
        for (int i = 0; i < ITEMS; ++i) {
            vf sum = share[i][0] * entry[0] + base.data[i * base.stride + e * base_step];
#pragma GCC unroll 4
            for (int t = 1; t < TARGETS; ++t) sum += share[i][t] * entry[t];
            to.data[i * to.stride + e] = sum;
        }
    }
}

// to_i = base_i + sum_t c_it s_t over `count` entries; with base_step 0 a base is one number
template <int ITEMS, class S, class Base>
TC_INLINE void mix(int targets, int count, const Slots c, const List<const S> s, const List<Base> base, int base_step, const List<vf> to) {
    int t = 0;
    const auto some = [&](auto width, const auto from, int step) __attribute__((always_inline)) {
        mix_of<ITEMS, decltype(width)::value>(count, c.from(t), s.from(t), from, step, to);
        t += decltype(width)::value;
    };
    if (targets >= 4) some(constant<4>, base, base_step);
    else if (targets >= 2) some(constant<2>, base, base_step);
    else some(constant<1>, base, base_step);
    while (t + 2 <= targets) some(constant<2>, to, 1);
    if (t < targets) some(constant<1>, to, 1);
}

// --------------------------------------------------------------------------------------------------------------- softmax

// Logits b [J] of one child, a vector for each parent, become couplings.
void softmax(vf* b, int J, bool leaky);

// c_j becomes d_j = c_j (g_j - mean) with mean = sum_k c_k g_k, and g_j becomes c_j.
inline void softmax_backward(vf* c, vf* g, int J, vf mean) {
    for (int j = 0; j < J; ++j) {
        const vf share = c[j];
        c[j] = share * (g[j] - mean);
        g[j] = share;
    }
}

inline vf inner(const vf* a, const vf* b, int count) {
    vf sum{};
    for (int e = 0; e < count; ++e) sum += a[e] * b[e];
    return sum;
}

// ---------------------------------------------------------------------------------------------------------------- cosine

// 1 / |u|, 0 where |u| is 0 (below 1e-22).
vf inverse_norm(const vf* u, int count);

// The gradient of ITEMS votes, targets in the order grad of round 0, state of round 0, grad of round 1, ..:
//     du = base + sum_k c^k grad^k + d^k state^k
// With cosine agreement the second part reaches a vote through its direction n = u / |u|: (a - n <n, a>) / |u| of
// a = sum_k d^k state^k. `inverse` [ITEMS] (`inverse_next` apart) is then 1 / |u|, else null; base null is 0.
// ROUNDS: 2 without cosine agreement, or 0, any.
template <int ITEMS, int ROUNDS, class S>
TC_INLINE void vote_gradient(int rounds, int count, const Slots c, const List<const S> targets, const S* base, const List<const vf> u,
                             const vf* inverse, int64_t inverse_next, const List<vf> du) {
    const S zero{};
    const List<const S> start{base != nullptr ? base : &zero, 0};
    const int step = base != nullptr;
    if constexpr (ROUNDS == 2) return mix_of<ITEMS, 4>(count, c, targets, start, step, du);
    if (inverse == nullptr) return mix<ITEMS>(2 * rounds, count, c, targets, start, step, du);
    const Slots each{c.data, c.item, 2 * c.target};
    mix<ITEMS>(rounds, count, each, List<const S>{targets.data, 2 * targets.stride}, start, step, du);
    for (int i = 0; i < ITEMS; ++i) {
        const vf *v = u.data + i * u.stride, *d = c.data + i * c.item + c.target, scale = inverse[i * inverse_next];
        const auto a = [&](int e) {
            vf sum{};
            for (int k = 0; k < rounds; ++k) sum += d[2 * k * c.target] * targets.data[(2 * k + 1) * targets.stride + e];
            return sum;
        };
        vf along{};
        for (int e = 0; e < count; ++e) along += v[e] * scale * a(e);
        for (int e = 0; e < count; ++e) du.data[i * du.stride + e] += scale * (a(e) - v[e] * scale * along);
    }
}

// ---------------------------------------------------------------------------------------------------------------- sums

// to[e] = sum over the lanes of v[e]
void sum_lanes_each(const vf* v, int64_t count, float* to);

// to[e] = sum of `count` parts [count][size], part by part
void add_parts(const float* parts, int64_t count, int64_t size, float* to);

constexpr int SUM_BLOCK = 64;  // terms added one after the other before the sum moves on: bounds the rounding error

// total += sum; sum = 0
void flush(vf* sum, vf* total, int64_t count);

}  // namespace torchcaps
