// Exact conversions to narrower floats.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulator {

// Last bit up for an inexact result: rounding that once more, to a much narrower format, gives what
// rounding the exact number at once would have given. `error` is exact minus `sum`.
inline float to_odd(float sum, float error) {
    uint32_t bits;
    memcpy(&bits, &sum, 4);
    if (!(std::fabs(error) > 0) || bits & 1) return sum;
    bits = (error > 0) == (sum > 0) ? bits + 1 : bits - 1;
    memcpy(&sum, &bits, 4);
    return sum;
}

// The sum a + b, rounded to odd.
inline float add_to_odd(float a, float b) {
    const float sum = a + b, b_part = sum - a;
    return to_odd(sum, (a - (sum - b_part)) + (b - b_part));
}

}  // namespace emulator
