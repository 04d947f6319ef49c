// The short vectors of CUDA C++.
#pragma once
#include <cstdint>

#define EMULATOR_VECTOR2(name, T)              \
    struct alignas(2 * sizeof(T)) name { T x, y; }; \
    inline name make_##name(T x, T y) { return {x, y}; }
#define EMULATOR_VECTOR3(name, T)              \
    struct name { T x, y, z; };                \
    inline name make_##name(T x, T y, T z) { return {x, y, z}; }
// Vectors of more than 16 bytes need no more than 16-byte alignment.
#define EMULATOR_VECTOR4(name, T)              \
    struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name { T x, y, z, w; }; \
    inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
#define EMULATOR_VECTORS(name, T) EMULATOR_VECTOR2(name##2, T) EMULATOR_VECTOR3(name##3, T) EMULATOR_VECTOR4(name##4, T)

EMULATOR_VECTORS(char, signed char)
EMULATOR_VECTORS(uchar, unsigned char)
EMULATOR_VECTORS(short, short)
EMULATOR_VECTORS(ushort, unsigned short)
EMULATOR_VECTORS(int, int)
EMULATOR_VECTORS(uint, unsigned)
EMULATOR_VECTORS(longlong, long long)
EMULATOR_VECTORS(ulonglong, unsigned long long)
EMULATOR_VECTORS(float, float)
EMULATOR_VECTORS(double, double)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
