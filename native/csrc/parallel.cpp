#include "parallel.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#ifdef _WIN32
#include <malloc.h>
#else
#include <pthread.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace torchcaps {
namespace {

struct Job {
    Task body;
    void* context;
    int64_t tasks;
    std::atomic<int64_t> next{0};
    std::atomic<bool> out_of_memory{false};

    void work() {
        for (;;) {
            const int64_t task = next.fetch_add(1, std::memory_order_relaxed);
            if (task >= tasks) return;
            try {
                body(context, task);
            } catch (const std::bad_alloc&) {
                out_of_memory.store(true, std::memory_order_relaxed);
            }
        }
    }
};

// Workers wait for an open job, join it and leave it. The caller closes the job once no task is left and waits only for
// those that joined: a worker that has no time slice yet holds up nobody.
class Pool {
public:
    void run(Job& job, int threads) {
        std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (!turn.owns_lock()) return job.work();  // another thread's call has the workers
        hire(threads - 1);
        {
            std::lock_guard<std::mutex> hold(lock_);
            open_ = &job;
            places_ = threads - 1;
            inside_ = 0;
        }
        wake_.notify_all();
        job.work();
        std::unique_lock<std::mutex> hold(lock_);
        open_ = nullptr;
        left_.wait(hold, [this] { return inside_ == 0; });
    }

private:
    void hire(int workers) {
        for (; workers_ < workers; ++workers_) {
            try {
                std::thread([this] { help(); }).detach();
            } catch (const std::system_error&) {
                return;  // fewer workers, same result
            }
        }
    }

    void help() {
        std::unique_lock<std::mutex> hold(lock_);
        for (;;) {
            wake_.wait(hold, [this] { return open_ != nullptr && places_ > 0; });
            Job* job = open_;
            --places_;
            ++inside_;
            hold.unlock();
            job->work();
            hold.lock();
            if (--inside_ == 0) left_.notify_one();
        }
    }

    std::mutex turn_, lock_;
    std::condition_variable wake_, left_;
    Job* open_ = nullptr;
    int places_ = 0, inside_ = 0, workers_ = 0;
};

// Never destroyed: workers may outlive the library's static objects. A forked child has no workers and starts anew.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
    Pool* found = the_pool.load(std::memory_order_acquire);
    if (found != nullptr) return *found;
    static std::mutex making;
    std::lock_guard<std::mutex> hold(making);
    found = the_pool.load(std::memory_order_acquire);
    if (found == nullptr) {
        found = new Pool;
#ifndef _WIN32
        static const int once = pthread_atfork(nullptr, nullptr, [] { the_pool.store(new Pool); });
        (void)once;
#endif
        the_pool.store(found, std::memory_order_release);
    }
    return *found;
}

constexpr std::size_t ALIGNMENT = 64;
constexpr std::size_t KEEP = std::size_t{16} << 20;  // scratch beyond this goes back after the task

void* aligned(std::size_t bytes) {
    bytes = std::max((bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, ALIGNMENT);
#ifdef _WIN32
    void* memory = _aligned_malloc(bytes, ALIGNMENT);
#else
    void* memory = std::aligned_alloc(ALIGNMENT, bytes);
#endif
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

void release(void* memory) {
#ifdef _WIN32
    _aligned_free(memory);
#else
    std::free(memory);
#endif
}

struct Kept {
    void* memory = nullptr;
    std::size_t bytes = 0;
    void drop() {
        release(memory);
        memory = nullptr;
        bytes = 0;
    }
    ~Kept() { drop(); }
};
thread_local Kept kept;

}  // namespace

void run_tasks(int64_t tasks, int threads, Task body, void* context) {
    if (tasks < threads) threads = static_cast<int>(tasks);
    if (threads <= 1) {
        for (int64_t task = 0; task < tasks; ++task) body(context, task);
        return;
    }
    Job job{body, context, tasks};
    pool().run(job, threads);
    if (job.out_of_memory.load()) throw std::bad_alloc();
}

void expect_writing(float* memory, int64_t floats) {
#ifdef __linux__
    constexpr std::uintptr_t PAGE = 4096, LEAST = std::uintptr_t{8} << 20;
    const auto at = reinterpret_cast<std::uintptr_t>(memory);
    const std::uintptr_t begin = (at + PAGE - 1) / PAGE * PAGE, end = (at + static_cast<std::uintptr_t>(floats) * sizeof(float)) / PAGE * PAGE;
    if (end > begin && end - begin >= LEAST) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)memory, (void)floats;
#endif
}

Buffer::Buffer(int64_t floats) : data_(static_cast<float*>(aligned(static_cast<std::size_t>(floats) * sizeof(float)))) {}
Buffer::~Buffer() { release(data_); }

void cut_scratch(const int64_t* vectors, int parts, vf** to) {
#ifdef TORCHCAPS_GUARDED  // every part by itself, so that a sanitizer sees its ends
    for (int k = 0; k < parts; ++k) to[k] = static_cast<vf*>(aligned(static_cast<std::size_t>(vectors[k]) * sizeof(vf)));
#else
    int64_t total = 0;
    for (int k = 0; k < parts; ++k) total += vectors[k];
    const std::size_t bytes = static_cast<std::size_t>(total) * sizeof(vf);
    if (bytes > kept.bytes) {
        kept.drop();
        kept.memory = aligned(bytes);
        kept.bytes = bytes;
    }
    to[0] = static_cast<vf*>(kept.memory);
    for (int k = 1; k < parts; ++k) to[k] = to[k - 1] + vectors[k - 1];
#endif
}

void end_scratch(vf** parts, int count) {
#ifdef TORCHCAPS_GUARDED
    for (int k = 0; k < count; ++k) release(parts[k]);
#else
    (void)parts, (void)count;
    if (kept.bytes > KEEP) kept.drop();
#endif
}

}  // namespace torchcaps
