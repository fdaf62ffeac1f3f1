// A 64-bit checksum of a block of memory. The same values as the Python form in tiers/checksum.py, which says the formula.

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kWords = 512;

// One block of words times the weights. Four sums, so that multiplications do not wait for each other.
uint64_t block_sum(const unsigned char *at, const uint64_t *weights) {
    uint64_t sums[4] = {0, 0, 0, 0};
    for (int64_t word = 0; word < kWords; word += 4) {
        uint64_t values[4];
        std::memcpy(values, at + word * 8, sizeof values);
        for (int lane = 0; lane < 4; ++lane) sums[lane] += values[lane] * weights[word + lane];
    }
    return sums[0] + sums[1] + sums[2] + sums[3];
}

}  // namespace

extern "C" uint64_t sw_checksum(const void *memory, int64_t length, const void *weights) {
    const auto *bytes = static_cast<const unsigned char *>(memory);
    const auto *table = static_cast<const uint64_t *>(weights);
    constexpr int64_t kBlock = kWords * 8;
    uint64_t total = 0;
    int64_t number = 0;
    for (; (number + 1) * kBlock <= length; ++number) {
        total += (2 * static_cast<uint64_t>(number) + 1) * block_sum(bytes + number * kBlock, table);
    }
    const int64_t rest = length - number * kBlock;
    if (rest > 0) {
        unsigned char last[kBlock] = {};
        std::memcpy(last, bytes + number * kBlock, static_cast<size_t>(rest));
        total += (2 * static_cast<uint64_t>(number) + 1) * block_sum(last, table);
    }
    return total + static_cast<uint64_t>(length);
}
