// See `shared_begin.cpp`.
extern __thread unsigned char emulator_shared_end[128];
alignas(64) __thread unsigned char emulator_shared_end[128];
