// Waits until counters in shared memory, which other processes increase, have reached given values.

#include <cstdint>
#include <ctime>

namespace {

bool have_reached(const volatile int64_t *const *words, const int64_t *targets, int64_t count) {
    for (int64_t at = 0; at < count; ++at)
        if (*words[at] < targets[at])
            return false;
    return true;
}

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

}  // namespace

// Looks `num_looks` times, then sleeps between looks, for at most `limit_us`. Returns whether all counters have reached their
// targets. On x86-64 reads are not reordered with later reads, so what was written before a counter was increased is seen.
extern "C" int sw_wait(const volatile int64_t *const *words, const int64_t *targets, int64_t count, int64_t num_looks,
                       int64_t limit_us) {
    for (int64_t look = 0; look < num_looks; ++look) {
        if (have_reached(words, targets, count))
            return 1;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    const int64_t end = now_ns() + limit_us * 1000;
    int64_t nap_ns = 20000;
    while (!have_reached(words, targets, count)) {
        if (now_ns() > end)
            return 0;
        const timespec nap = {0, nap_ns};
        nanosleep(&nap, nullptr);
        nap_ns = nap_ns < 400000 ? nap_ns + nap_ns / 4 : 500000;
    }
    return 1;
}
