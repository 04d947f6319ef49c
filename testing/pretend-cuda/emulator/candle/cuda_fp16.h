// What candle's kernels take from CUDA and the crate's own do without.
#pragma once
#include <math.h>

#include <cmath>
#include <cstdint>

#include "../emulator.h"
#include "../function.h"
#include "cuda/std/limits"

#undef assert
#define assert(condition) ((condition) ? void() : emulator::fail("assertion failed: " #condition))

inline double __longlong_as_double(long long bits) {
    double value;
    memcpy(&value, &bits, 8);
    return value;
}
inline long long __double_as_longlong(double value) {
    long long bits;
    memcpy(&bits, &value, 8);
    return bits;
}
template <class T, class U> inline T atomicMin(T *p, U value) { return atomicMin<T>(p, static_cast<T>(value)); }
template <class T, class U> inline T atomicMax(T *p, U value) { return atomicMax<T>(p, static_cast<T>(value)); }
// Of products of GGML blocks with 8-bit activations, which are not registered.
inline unsigned __vsubss4(unsigned, unsigned) { emulator::fail("__vsubss4 is not emulated"); }
// (1 + erf(x / sqrt(2))) / 2, whose left tail is not lost in the sum.
inline double normcdf(double x) { return 0.5 * std::erfc(-x * M_SQRT1_2); }
inline float normcdff(float x) { return static_cast<float>(normcdf(static_cast<double>(x))); }

// In both 16-bit formats. What is not one operation is computed in float, and rounded.
#define EMULATED_FUNCTIONS_OF(T)                                                       \
    inline bool __hisnan(T a) { return std::isnan(static_cast<float>(a)); }            \
    inline T hsqrt(T a) { return std::sqrt(static_cast<float>(a)); }                   \
    inline T hcos(T a) { return std::cos(static_cast<float>(a)); }                     \
    inline T hsin(T a) { return std::sin(static_cast<float>(a)); }                     \
    inline T hlog(T a) { return std::log(static_cast<float>(a)); }                     \
    inline T hexp(T a) { return std::exp(static_cast<float>(a)); }                     \
    inline T __hmax_nan(T a, T b) {                                                    \
        return __hisnan(a) ? a : __hisnan(b) || static_cast<float>(a) < static_cast<float>(b) ? b : a; \
    }                                                                                  \
    inline T __hmin_nan(T a, T b) {                                                    \
        return __hisnan(a) ? a : __hisnan(b) || static_cast<float>(b) < static_cast<float>(a) ? b : a; \
    }                                                                                  \
    inline T &operator+=(T &a, const T &b) { return a = a + b; }                       \
    inline T &operator*=(T &a, const T &b) { return a = a * b; }
EMULATED_FUNCTIONS_OF(__half)
EMULATED_FUNCTIONS_OF(__nv_bfloat16)
