// A 64-bit checksum of a block of memory. The same values as the Python form in tiers/checksum.py, which says the formula.

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kWords = 512;
constexpr uint64_t kHalf = 0xFFFFFFFFULL;

// The sum of both halves of every word of a block, each times a weight of its own.
uint64_t block_sum(const unsigned char *at, const uint64_t *low, const uint64_t *high) {
  uint64_t sum = 0;
  for (int64_t word = 0; word < kWords; ++word) {
    uint64_t value;
    std::memcpy(&value, at + word * 8, sizeof value);
    sum += (value & kHalf) * low[word] + (value >> 32) * high[word];
  }
  return sum;
}

#if defined(__x86_64__)
// The same with AVX2, four words at a time: three times as fast on memory in the cache.
__attribute__((target("avx2"))) uint64_t block_sum_avx2(const unsigned char *at, const uint64_t *low, const uint64_t *high) {
  __m256i lows = _mm256_setzero_si256(), highs = lows;
  for (int64_t word = 0; word < kWords; word += 4) {
    const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at + word * 8));
    const __m256i low_weights = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(low + word));
    const __m256i high_weights = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(high + word));
    lows = _mm256_add_epi64(lows, _mm256_mul_epu32(values, low_weights));
    highs = _mm256_add_epi64(highs, _mm256_mul_epu32(_mm256_srli_epi64(values, 32), high_weights));
  }
  uint64_t sums[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(sums), _mm256_add_epi64(lows, highs));
  return sums[0] + sums[1] + sums[2] + sums[3];
}
#endif

using BlockSum = uint64_t (*)(const unsigned char *, const uint64_t *, const uint64_t *);

BlockSum best_block_sum() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) {
    return block_sum_avx2;
  }
#endif
  return block_sum;
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
  static const BlockSum sum_of = best_block_sum();
  uint64_t total = 0;
  int64_t number = 0;
  for (; (number + 1) * kBlock <= length; ++number) {
    total += mixed(sum_of(bytes + number * kBlock, low, high), static_cast<uint64_t>(number));
  }
  const int64_t rest = length - number * kBlock;
  if (rest > 0) {
    unsigned char last[kBlock] = {};
    std::memcpy(last, bytes + number * kBlock, static_cast<size_t>(rest));
    total += mixed(sum_of(last, low, high), static_cast<uint64_t>(number));
  }
  return mixed(total, static_cast<uint64_t>(length));
}
