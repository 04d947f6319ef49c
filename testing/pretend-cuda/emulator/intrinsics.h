// Arithmetic, bits, loads, and atomics of one thread.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "half.h"

template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) {
    static_assert(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>);
    if constexpr (std::is_floating_point_v<A> || std::is_floating_point_v<B>) return std::fmin(a, b);
    using T = std::common_type_t<A, B>;
    return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) {
    static_assert(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>);
    if constexpr (std::is_floating_point_v<A> || std::is_floating_point_v<B>) return std::fmax(a, b);
    using T = std::common_type_t<A, B>;
    return T(a) < T(b) ? T(b) : T(a);
}

inline float __uint_as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<uint32_t>(bits)); }
inline int __float_as_int(float value) { return static_cast<int>(__float_as_uint(value)); }

// Compiled with -ffp-contract=off: these are not joined into other operations.
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __frcp_rn(float a) { return 1.f / a; }
// Approximations on a GPU, of at most a few units in the last place.
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float a) { return std::exp(a); }
inline float __logf(float a) { return std::log(a); }
inline float __log2f(float a) { return std::log2(a); }
inline float rsqrtf(float a) { return 1.f / __builtin_sqrtf(a); }
inline float __saturatef(float a) { return a > 0.f ? (a < 1.f ? a : 1.f) : 0.f; }

namespace emulator {
// Conversions of a GPU saturate, and make zero of NaN.
template <class T> inline T saturate(double value, double low, double high) {
    if (std::isnan(value)) return 0;
    return value <= low ? static_cast<T>(low) : value >= high ? static_cast<T>(high) : static_cast<T>(value);
}
inline int to_int(float rounded) { return saturate<int>(rounded, -2147483648.0, 2147483647.0); }
inline unsigned to_uint(float rounded) { return saturate<unsigned>(rounded, 0.0, 4294967295.0); }
}  // namespace emulator
inline int __float2int_rn(float a) { return emulator::to_int(std::nearbyint(a)); }
inline int __float2int_rz(float a) { return emulator::to_int(std::trunc(a)); }
inline int __float2int_rd(float a) { return emulator::to_int(std::floor(a)); }
inline int __float2int_ru(float a) { return emulator::to_int(std::ceil(a)); }
inline unsigned __float2uint_rn(float a) { return emulator::to_uint(std::nearbyint(a)); }
inline unsigned __float2uint_rz(float a) { return emulator::to_uint(std::trunc(a)); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline float __uint2float_rn(unsigned a) { return static_cast<float>(a); }

inline int __popc(uint32_t a) { return __builtin_popcount(a); }
inline int __popcll(uint64_t a) { return __builtin_popcountll(a); }
inline int __clz(int a) { return a ? __builtin_clz(static_cast<unsigned>(a)) : 32; }
inline int __clzll(long long a) { return a ? __builtin_clzll(static_cast<unsigned long long>(a)) : 64; }
inline int __ffs(int a) { return __builtin_ffs(a); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t(a) * b >> 32); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
    return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline uint32_t __brev(uint32_t a) {
    uint32_t reversed = 0;
    for (int i = 0; i < 32; ++i) reversed |= (a >> i & 1) << (31 - i);
    return reversed;
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = uint64_t(high) << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t select = selector >> 4 * i;
        uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (select & 7)) & 0xff;
        if (select & 8) byte = byte & 0x80 ? 0xff : 0;  // the sign, eight times
        result |= byte << 8 * i;
    }
    return result;
}
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift) {
    return static_cast<uint32_t>((uint64_t(high) << 32 | low) << (shift & 31) >> 32);
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
    return static_cast<uint32_t>((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += int8_t(a >> 8 * i) * int8_t(b >> 8 * i);
    return c;
}

// Hints of where to cache.
template <class T> inline T __ldg(const T *p) { return *p; }
template <class T> inline T __ldca(const T *p) { return *p; }
template <class T> inline T __ldcg(const T *p) { return *p; }
template <class T> inline T __ldcs(const T *p) { return *p; }
template <class T> inline T __ldlu(const T *p) { return *p; }
template <class T> inline void __stcg(T *p, T value) { *p = value; }
template <class T> inline void __stcs(T *p, T value) { *p = value; }

// No other thread runs meanwhile.
template <class T> inline T atomicExch(T *p, T value) {
    const T old = *p;
    *p = value;
    return old;
}
template <class T> inline T atomicAdd(T *p, T value) { return atomicExch<T>(p, *p + value); }
template <class T> inline T atomicSub(T *p, T value) { return atomicExch<T>(p, *p - value); }
template <class T> inline T atomicMin(T *p, T value) { return atomicExch<T>(p, min(*p, value)); }
template <class T> inline T atomicMax(T *p, T value) { return atomicExch<T>(p, max(*p, value)); }
template <class T> inline T atomicOr(T *p, T value) { return atomicExch<T>(p, *p | value); }
template <class T> inline T atomicAnd(T *p, T value) { return atomicExch<T>(p, *p & value); }
template <class T> inline T atomicCAS(T *p, T expected, T value) {
    return atomicExch<T>(p, *p == expected ? value : *p);
}
inline unsigned atomicInc(unsigned *p, unsigned limit) { return atomicExch(p, *p >= limit ? 0u : *p + 1); }
