// Threads and memory of the kernels.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace torchcaps {

using Task = void (*)(void* context, int64_t task);

// Runs task 0 .. tasks - 1, each once, on the calling thread and up to threads - 1 workers.
// What a task computes never depends on the thread that runs it: results are the same for every thread count.
void run_tasks(int64_t tasks, int threads, Task body, void* context);

template <class Body>
void parallel_for(int64_t tasks, int threads, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run_tasks(tasks, threads, [](void* context, int64_t task) { (*static_cast<Plain*>(context))(task); }, &body);
}

// Asks for large pages behind memory that is about to be written for the first time: a fault for each small one costs more
// than the writing. Does nothing for little memory, or where the system knows no large pages.
void expect_writing(float* memory, int64_t floats);

// Aligned memory of one call. Throws std::bad_alloc.
class Buffer {
public:
    explicit Buffer(int64_t floats);
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    float* floats() { return data_; }
    vf* vectors() { return reinterpret_cast<vf*>(data_); }

private:
    float* data_;
};

// Memory of one task, several parts of so many vectors each, cut from a block that the thread keeps for its next task: fresh
// pages would cost more than the work. Throws std::bad_alloc.
void cut_scratch(const int64_t* vectors, int parts, vf** to);
void end_scratch(vf** parts, int count);

template <int N>
class Scratch {
public:
    explicit Scratch(const int64_t (&vectors)[N]) { cut_scratch(vectors, N, parts.data()); }
    ~Scratch() { end_scratch(parts.data(), N); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    std::array<vf*, N> parts;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace torchcaps
