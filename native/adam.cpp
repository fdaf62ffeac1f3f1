// Adam and AdamW in one pass: scale the gradient, decay, update both moments and the master, round a 16-bit copy out.
//
// Every operation is one that IEEE 754 rounds correctly (the file is compiled without contraction, fused multiply-adds are
// written out), so the scalar loop, every vector width and every cut of a vector give the same bits. They stand where torch's
// own element-wise kernels have them; torch's square root is another library's and may differ in the last bit.

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

enum Dtype : int { kNone = 0, kFloat32 = 1, kBfloat16 = 2, kFloat16 = 3 };

struct Settings {
  float grad_scale;   // multiplies every gradient: a clipping factor
  float shrink;       // decoupled weight decay: masters are multiplied by it first
  float l2;           // coupled weight decay: this share of the master is added to the gradient
  float mean_weight;  // 1 - beta1
  float beta2;
  float square_weight;  // 1 - beta2
  float root_correction;
  float eps;
  float minus_step;
  int decays;     // 0 not at all, 1 decoupled, 2 coupled
  int maximizes;  // the gradient's sign is turned
};

struct Arrays {
  float *master;
  float *mean;
  float *square;
  const void *grad;
  void *out;
  int grad_dtype;
  int out_dtype;
};

inline float from_bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float from_float16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 0x1F, fraction = half & 0x3FF;
  uint32_t bits;
  if (exponent == 0x1F) {
    bits = sign | 0x7F800000 | (fraction << 13) | (fraction ? 0x400000 : 0);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (fraction << 13);
  } else {
    const float small = static_cast<float>(fraction) * 0x1p-24f;
    memcpy(&bits, &small, 4);
    bits |= sign;
  }
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t to_float16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00 | ((magnitude >> 13) & 0x3FF));
  if (magnitude >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);  // rounds to 65536 or more
  if (magnitude < 0x38800000) {  // below the smallest normal number: the addition rounds to a multiple of 2^-24
    float absolute;
    memcpy(&absolute, &magnitude, 4);
    absolute += 0.5f;
    uint32_t rounded;
    memcpy(&rounded, &absolute, 4);
    return static_cast<uint16_t>(sign | (rounded - 0x3F000000));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13));
}

inline float load_grad(const Arrays &a, int64_t i) {
  switch (a.grad_dtype) {
    case kBfloat16:
      return from_bfloat16(static_cast<const uint16_t *>(a.grad)[i]);
    case kFloat16:
      return from_float16(static_cast<const uint16_t *>(a.grad)[i]);
    default:
      return static_cast<const float *>(a.grad)[i];
  }
}

void update_scalar(const Arrays &a, const Settings &s, int64_t begin, int64_t end) {
  const bool is_light = std::fabs(s.mean_weight) < 0.5f;
  const float coefficient = is_light ? s.mean_weight : s.mean_weight - 1.0f;
  for (int64_t i = begin; i < end; ++i) {
    float grad = load_grad(a, i) * s.grad_scale;
    if (s.maximizes) grad = -grad;
    float master = a.master[i];
    if (s.decays == 1) master = master * s.shrink;
    if (s.decays == 2) grad = std::fma(s.l2, master, grad);
    float mean = a.mean[i];
    mean = std::fma(coefficient, grad - mean, is_light ? mean : grad);
    const float square = std::fma(s.square_weight * grad, grad, a.square[i] * s.beta2);
    const float root = std::sqrt(square) / s.root_correction + s.eps;
    master = master + s.minus_step * mean / root;
    a.mean[i] = mean;
    a.square[i] = square;
    a.master[i] = master;
    if (a.out_dtype == kBfloat16) static_cast<uint16_t *>(a.out)[i] = to_bfloat16(master);
    if (a.out_dtype == kFloat16) static_cast<uint16_t *>(a.out)[i] = to_float16(master);
    if (a.out_dtype == kFloat32) static_cast<float *>(a.out)[i] = master;
  }
}

#if defined(__x86_64__)

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")))

namespace avx2 {

using Vector = __m256;
constexpr int kWidth = 8;

AVX2 inline Vector load_bfloat16(const uint16_t *at) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i *>(at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}

AVX2 inline void store_bfloat16(uint16_t *at, Vector value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), is_nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i *>(at), _mm256_castsi256_si128(packed));
}

AVX2 inline Vector load_float16(const uint16_t *at) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
}

AVX2 inline void store_float16(uint16_t *at, Vector value) {
  _mm_storeu_si128(reinterpret_cast<__m128i *>(at), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

#define ISA AVX2
#define V(name) _mm256_##name
#define XOR(a, b) _mm256_xor_ps(a, b)
#include "adam_vector.inc"
#undef ISA
#undef V
#undef XOR

}  // namespace avx2

namespace avx512 {

using Vector = __m512;
constexpr int kWidth = 16;

AVX512 inline Vector load_bfloat16(const uint16_t *at) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

AVX512 inline void store_bfloat16(uint16_t *at, Vector value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd), 16);
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), _mm512_cvtepi32_epi16(rounded));
}

AVX512 inline Vector load_float16(const uint16_t *at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
}

AVX512 inline void store_float16(uint16_t *at, Vector value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

#define ISA AVX512
#define V(name) _mm512_##name
#define XOR(a, b) _mm512_xor_ps(a, b)
#include "adam_vector.inc"
#undef ISA
#undef V
#undef XOR

}  // namespace avx512

#endif  // __x86_64__

// 0 scalar, 1 AVX2, 2 AVX-512: the widest this processor has, at most `most`.
int choose(int most) {
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const int widest = has_avx512 ? 2 : has_avx2 ? 1 : 0;
#else
  const int widest = 0;
#endif
  return std::min(most, widest);
}

void update(const Arrays &arrays, const Settings &settings, int64_t begin, int64_t end, int width) {
  int64_t done = begin;
#if defined(__x86_64__)
  if (width == 2) done = avx512::update(arrays, settings, begin, end);
  if (width == 1) done = avx2::update(arrays, settings, begin, end);
#endif
  update_scalar(arrays, settings, done, end);
}

}  // namespace

extern "C" {

int sw_adam_width(int most) { return choose(most); }

void sw_adam(const Arrays *arrays, const Settings *settings, int64_t numel, int num_threads, int most_width) {
  const int width = choose(most_width);
  // Threads take the next part when they are done with one: a core that is busy with something else delays no one.
  constexpr int64_t kPart = 1 << 16;
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t begin; (begin = next.fetch_add(kPart)) < numel;) {
      update(*arrays, *settings, begin, std::min(begin + kPart, numel), width);
    }
  };
  std::vector<std::thread> threads;
  for (int64_t number = 1; number < std::min<int64_t>(num_threads, (numel + kPart - 1) / kPart); ++number) {
    try {
      threads.emplace_back(work);
    } catch (...) {  // no more threads to be had: those there are take all parts
      break;
    }
  }
  work();
  for (auto &thread : threads) thread.join();
}
}
