// __nv_bfloat16 and pairs of it, as in cuda_bf16.h. Every operation is rounded once, to nearest, ties to even.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "rounding.h"
#include "vector_types.h"

struct __nv_bfloat16;
inline float __bfloat162float(__nv_bfloat16 value);
inline __nv_bfloat16 __float2bfloat16_rn(float value);

struct __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float value) { *this = __float2bfloat16_rn(value); }
    operator float() const { return __bfloat162float(*this); }
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    __nv_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) : x(x), y(y) {}
};
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t bits) {
    __nv_bfloat16 value;
    value.bits = bits;
    return value;
}
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline float __bfloat162float(__nv_bfloat16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (std::isnan(value)) return __ushort_as_bfloat16(0x7fff);
    return __ushort_as_bfloat16(static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}
inline __nv_bfloat16 __float2bfloat16(float value) { return __float2bfloat16_rn(value); }

inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) { return {low, high}; }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) { return {low, high}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 value) { return {value, value}; }
inline __nv_bfloat162 __float2bfloat162_rn(float value) { return {__nv_bfloat16(value), __nv_bfloat16(value)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
    return {__nv_bfloat16(low), __nv_bfloat16(high)};
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 pair) { return __floats2bfloat162_rn(pair.x, pair.y); }
inline float2 __bfloat1622float2(__nv_bfloat162 pair) {
    return {__bfloat162float(pair.x), __bfloat162float(pair.y)};
}
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 pair) { return pair.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 pair) { return pair.y; }
inline float __low2float(__nv_bfloat162 pair) { return __bfloat162float(pair.x); }
inline float __high2float(__nv_bfloat162 pair) { return __bfloat162float(pair.y); }

inline __nv_bfloat16 __hadd(__nv_bfloat16 a, __nv_bfloat16 b) {
    return __float2bfloat16_rn(__bfloat162float(a) + __bfloat162float(b));
}
inline __nv_bfloat16 __hsub(__nv_bfloat16 a, __nv_bfloat16 b) {
    return __float2bfloat16_rn(__bfloat162float(a) - __bfloat162float(b));
}
inline __nv_bfloat16 __hmul(__nv_bfloat16 a, __nv_bfloat16 b) {
    return __float2bfloat16_rn(__bfloat162float(a) * __bfloat162float(b));
}
inline __nv_bfloat16 __hdiv(__nv_bfloat16 a, __nv_bfloat16 b) {
    return __float2bfloat16_rn(__bfloat162float(a) / __bfloat162float(b));
}
inline __nv_bfloat16 __hneg(__nv_bfloat16 a) { return __ushort_as_bfloat16(a.bits ^ 0x8000); }
inline __nv_bfloat16 __habs(__nv_bfloat16 a) { return __ushort_as_bfloat16(a.bits & 0x7fff); }
// The product has 16 digits: exact in float, unless it is a subnormal one.
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    return __float2bfloat16_rn(emulator::add_to_odd(__bfloat162float(a) * __bfloat162float(b), __bfloat162float(c)));
}
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline __nv_bfloat162 __hneg2(__nv_bfloat162 a) { return {__hneg(a.x), __hneg(a.y)}; }
inline __nv_bfloat162 __habs2(__nv_bfloat162 a) { return {__habs(a.x), __habs(a.y)}; }
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}

inline __nv_bfloat16 operator+(__nv_bfloat16 a, __nv_bfloat16 b) { return __hadd(a, b); }
inline __nv_bfloat16 operator-(__nv_bfloat16 a, __nv_bfloat16 b) { return __hsub(a, b); }
inline __nv_bfloat16 operator*(__nv_bfloat16 a, __nv_bfloat16 b) { return __hmul(a, b); }
inline __nv_bfloat16 operator/(__nv_bfloat16 a, __nv_bfloat16 b) { return __hdiv(a, b); }
inline __nv_bfloat16 operator-(__nv_bfloat16 a) { return __hneg(a); }
inline __nv_bfloat162 operator+(__nv_bfloat162 a, __nv_bfloat162 b) { return __hadd2(a, b); }
inline __nv_bfloat162 operator-(__nv_bfloat162 a, __nv_bfloat162 b) { return __hsub2(a, b); }
inline __nv_bfloat162 operator*(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmul2(a, b); }
