// half and half2, as in cuda_fp16.h. Every operation is rounded once, to nearest, ties to even.
#pragma once
#include <cstdint>
#include <cstring>

#include "rounding.h"
#include "vector_types.h"

struct __half;
inline float __half2float(__half value);
inline __half __float2half_rn(float value);

struct __half {
    uint16_t bits;
    __half() = default;
    __half(float value) { *this = __float2half_rn(value); }
    operator float() const { return __half2float(*this); }
};
struct alignas(4) __half2 {
    __half x, y;
    __half2() = default;
    __half2(__half x, __half y) : x(x), y(y) {}
};
using half = __half;
using half2 = __half2;

inline float __half2float(__half value) {
    _Float16 number;
    memcpy(&number, &value, 2);
    return static_cast<float>(number);
}
inline __half __float2half_rn(float value) {
    const _Float16 number = static_cast<_Float16>(value);
    __half result;
    memcpy(&result, &number, 2);
    return result;
}
inline __half __float2half(float value) { return __float2half_rn(value); }
inline __half __ushort_as_half(uint16_t bits) {
    __half value;
    value.bits = bits;
    return value;
}
inline uint16_t __half_as_ushort(__half value) { return value.bits; }

inline __half2 __halves2half2(__half low, __half high) { return {low, high}; }
inline __half2 make_half2(__half low, __half high) { return {low, high}; }
inline __half2 __half2half2(__half value) { return {value, value}; }
inline __half2 __float2half2_rn(float value) { return {__half(value), __half(value)}; }
inline __half2 __floats2half2_rn(float low, float high) { return {__half(low), __half(high)}; }
inline __half2 __float22half2_rn(float2 pair) { return {__half(pair.x), __half(pair.y)}; }
inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }
inline __half __low2half(__half2 pair) { return pair.x; }
inline __half __high2half(__half2 pair) { return pair.y; }
inline __half2 __low2half2(__half2 pair) { return {pair.x, pair.x}; }
inline __half2 __high2half2(__half2 pair) { return {pair.y, pair.y}; }
inline __half2 __lows2half2(__half2 a, __half2 b) { return {a.x, b.x}; }
inline __half2 __highs2half2(__half2 a, __half2 b) { return {a.y, b.y}; }
inline float __low2float(__half2 pair) { return __half2float(pair.x); }
inline float __high2float(__half2 pair) { return __half2float(pair.y); }

// The float result of one operation on halves is exact, or has more than twice their digits.
inline __half __hadd(__half a, __half b) { return __float2half_rn(__half2float(a) + __half2float(b)); }
inline __half __hsub(__half a, __half b) { return __float2half_rn(__half2float(a) - __half2float(b)); }
inline __half __hmul(__half a, __half b) { return __float2half_rn(__half2float(a) * __half2float(b)); }
inline __half __hdiv(__half a, __half b) { return __float2half_rn(__half2float(a) / __half2float(b)); }
inline __half __hneg(__half a) { return __ushort_as_half(a.bits ^ 0x8000); }
inline __half __habs(__half a) { return __ushort_as_half(a.bits & 0x7fff); }
// The product is exact in float; the sum is not.
inline __half __hfma(__half a, __half b, __half c) {
    return __float2half_rn(emulator::add_to_odd(__half2float(a) * __half2float(b), __half2float(c)));
}
inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline __half2 __h2div(__half2 a, __half2 b) { return {__hdiv(a.x, b.x), __hdiv(a.y, b.y)}; }
inline __half2 __hneg2(__half2 a) { return {__hneg(a.x), __hneg(a.y)}; }
inline __half2 __habs2(__half2 a) { return {__habs(a.x), __habs(a.y)}; }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }

inline __half operator+(__half a, __half b) { return __hadd(a, b); }
inline __half operator-(__half a, __half b) { return __hsub(a, b); }
inline __half operator*(__half a, __half b) { return __hmul(a, b); }
inline __half operator/(__half a, __half b) { return __hdiv(a, b); }
inline __half operator-(__half a) { return __hneg(a); }
inline __half2 operator+(__half2 a, __half2 b) { return __hadd2(a, b); }
inline __half2 operator-(__half2 a, __half2 b) { return __hsub2(a, b); }
inline __half2 operator*(__half2 a, __half2 b) { return __hmul2(a, b); }
inline __half2 operator/(__half2 a, __half2 b) { return __h2div(a, b); }
