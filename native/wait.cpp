// Waits until counters in shared memory, which other processes increase, have reached given values.
//
// A process that increases a counter calls `sw_wake`, so a waiting process sleeps in the kernel (futex) until then. Counters are
// 64-bit words of a little-endian machine; the kernel compares the lower half.

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <climits>
#include <cstdint>
#include <ctime>

namespace {

using Counter = const volatile int64_t;

// The first counter that has not reached its target, with the value it has; nullptr if all have.
Counter *first_behind(Counter *const *words, const int64_t *targets, int64_t count, int64_t *value) {
    for (int64_t at = 0; at < count; ++at) {
        *value = *words[at];
        if (*value < targets[at])
            return words[at];
    }
    return nullptr;
}

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

// Sleeps until a counter that had `value` is increased; may return earlier.
void sleep_until_woken(Counter *word, int64_t value, int64_t limit_ns) {
#if defined(__linux__)
    const timespec limit = {limit_ns / 1000000000LL, limit_ns % 1000000000LL};
    // The kernel compares first, so that no increase is missed. Not FUTEX_PRIVATE: other processes wake.
    syscall(SYS_futex, word, FUTEX_WAIT, static_cast<uint32_t>(value), &limit, nullptr, 0);
#else
    const timespec nap = {0, limit_ns < 50000 ? limit_ns : 50000};
    nanosleep(&nap, nullptr);
#endif
}

}  // namespace

// Looks `num_looks` times, then sleeps until it is woken, for at most `limit_us`. Returns whether all counters have reached their
// targets. On x86-64 reads are not reordered with later reads, so what was written before a counter was increased is seen.
extern "C" int sw_wait(Counter *const *words, const int64_t *targets, int64_t count, int64_t num_looks, int64_t limit_us) {
    int64_t value = 0;
    for (int64_t look = 0; look < num_looks; ++look) {
        if (first_behind(words, targets, count, &value) == nullptr)
            return 1;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    const int64_t end = now_ns() + limit_us * 1000;
    while (Counter *word = first_behind(words, targets, count, &value)) {
        const int64_t left_ns = end - now_ns();
        if (left_ns <= 0)
            return 0;
        sleep_until_woken(word, value, left_ns);
    }
    return 1;
}

// Wakes all processes that wait for a counter; called after it was increased.
extern "C" void sw_wake(Counter *word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}
