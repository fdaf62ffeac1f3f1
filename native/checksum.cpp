// A 64-bit checksum of a block of memory: four interleaved lanes of multiply and rotate, near the speed of reading.

#include <cstdint>
#include <cstring>

namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87ULL;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FULL;

inline uint64_t rotate(uint64_t value, int by) { return (value << by) | (value >> (64 - by)); }

inline uint64_t mix(uint64_t state, uint64_t word) { return rotate(state + word * kPrime2, 31) * kPrime1; }

}  // namespace

extern "C" uint64_t sw_checksum(const void *memory, int64_t length) {
  const char *at = static_cast<const char *>(memory);
  uint64_t lanes[4] = {kPrime1, kPrime2, kPrime1 ^ kPrime2, static_cast<uint64_t>(length)};
  uint64_t words[4];
  for (; length >= 32; length -= 32, at += 32) {
    memcpy(words, at, 32);
    for (int lane = 0; lane < 4; ++lane) lanes[lane] = mix(lanes[lane], words[lane]);
  }
  memset(words, 0, 32);
  memcpy(words, at, static_cast<size_t>(length));
  uint64_t total = 0;
  for (int lane = 0; lane < 4; ++lane) total = mix(total ^ lanes[lane], words[lane]);
  return total ^ (total >> 29);
}
