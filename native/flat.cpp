// Copies a range of a flat vector whose parameters lie apart in memory, as freshly made gradients do.

#include <algorithm>
#include <cstdint>
#include <cstring>

// `slots`: (offset, length) of each parameter in elements, by offset. `sources`: where each lies; null counts as zeros, and so
// does whatever no parameter covers.
extern "C" void sw_read_flat(const void *const *sources, const int64_t *slots, int64_t num_slots, int64_t itemsize, int64_t start,
                             int64_t numel, void *out) {
    char *target = static_cast<char *>(out);
    const int64_t stop = start + numel;
    int64_t at = start;
    int64_t low = 0, high = num_slots;  // the first slot that ends after `start`
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (slots[2 * middle] + slots[2 * middle + 1] > start)
            high = middle;
        else
            low = middle + 1;
    }
    for (int64_t slot = low; slot < num_slots && at < stop; ++slot) {
        const int64_t first = std::max(slots[2 * slot], at), last = std::min(slots[2 * slot] + slots[2 * slot + 1], stop);
        if (first >= last)
            continue;
        std::memset(target + (at - start) * itemsize, 0, (first - at) * itemsize);
        char *place = target + (first - start) * itemsize;
        if (sources[slot] == nullptr)
            std::memset(place, 0, (last - first) * itemsize);
        else
            std::memcpy(place, static_cast<const char *>(sources[slot]) + (first - slots[2 * slot]) * itemsize,
                        (last - first) * itemsize);
        at = last;
    }
    if (at < stop)
        std::memset(target + (at - start) * itemsize, 0, (stop - at) * itemsize);
}
