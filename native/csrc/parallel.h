// Threads and memory of the kernels.
#pragma once
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

// Scratch of one task, cut from a block the thread keeps for the next task: fresh pages would cost more than the work.
class Scratch {
public:
    explicit Scratch(int64_t vectors);  // room for that many vectors in all
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    vf* vectors(int64_t count) {
        vf* start = next_;
        next_ += count;
        return start;
    }

private:
    vf* next_;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace torchcaps
