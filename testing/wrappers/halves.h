// f16 and bf16 numbers in exact arithmetic, apart from both CUDA's and the emulator's.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

inline double half_value(uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double magnitude = exponent == 31  ? (mantissa ? NAN : INFINITY)
                             : exponent == 0 ? std::ldexp(mantissa, -24)
                                             : std::ldexp(1024 + mantissa, exponent - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
}

// The nearest half, ties to even.
inline uint16_t half_bits(double value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    if (std::isnan(value)) return 0x7e00;
    if (magnitude >= 65520) return sign | 0x7c00;
    if (magnitude == 0) return sign;
    int exponent;
    std::frexp(magnitude, &exponent);
    const int unit = exponent - 11 < -24 ? -24 : exponent - 11;  // of the last place
    const auto steps = uint16_t(std::nearbyint(std::ldexp(magnitude, -unit)));
    return sign | (steps + uint16_t(unit + 24) * 1024);
}

inline double bfloat_value(uint16_t bits) {
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

// The nearest bf16, ties to even, of a number that a float holds.
inline uint16_t bfloat_bits(double value) {
    const auto number = float(value);
    uint32_t word;
    memcpy(&word, &number, sizeof word);
    if (std::isnan(value)) return 0x7fc0;
    return uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
}
