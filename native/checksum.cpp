// A 64-bit checksum of a block of memory. The same values as the Python form in tiers/checksum.py, which says the formula.

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kWords = 512;

// The sum of both halves of every word of a block, each times a weight of its own.
uint64_t block_sum(const unsigned char *at, const uint64_t *low, const uint64_t *high) {
  uint64_t sums[4] = {0, 0, 0, 0};
  for (int64_t word = 0; word < kWords; word += 4) {
    uint64_t values[4];
    std::memcpy(values, at + word * 8, sizeof values);
    for (int lane = 0; lane < 4; ++lane) {
      sums[lane] += (values[lane] & 0xFFFFFFFFULL) * low[word + lane] + (values[lane] >> 32) * high[word + lane];
    }
  }
  return sums[0] + sums[1] + sums[2] + sums[3];
}

uint64_t mixed(uint64_t sum, uint64_t number) {
  sum += number * 0x9E3779B97F4A7C15ULL;
  sum = (sum ^ (sum >> 32)) * 0xD6E8FEB86659FD93ULL;
  sum = (sum ^ (sum >> 32)) * 0xD6E8FEB86659FD93ULL;
  return sum ^ (sum >> 32);
}

}  // namespace

extern "C" uint64_t sw_block_checksum(const void *memory, int64_t length, const void *weights) {
  const auto *bytes = static_cast<const unsigned char *>(memory);
  const auto *low = static_cast<const uint64_t *>(weights);
  const uint64_t *high = low + kWords;
  constexpr int64_t kBlock = kWords * 8;
  uint64_t total = 0;
  int64_t number = 0;
  for (; (number + 1) * kBlock <= length; ++number) {
    total += mixed(block_sum(bytes + number * kBlock, low, high), static_cast<uint64_t>(number));
  }
  const int64_t rest = length - number * kBlock;
  if (rest > 0) {
    unsigned char last[kBlock] = {};
    std::memcpy(last, bytes + number * kBlock, static_cast<size_t>(rest));
    total += mixed(block_sum(last, low, high), static_cast<uint64_t>(number));
  }
  return mixed(total, static_cast<uint64_t>(length));
}
