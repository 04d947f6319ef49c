#include "mma.h"

#include <cstring>

#include "diagnosis.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace emulator {

static const uint32_t FULL = 0xffffffffu;

static void need_whole_warp(Operation operation, Place place) {
    if (current->warp->lanes != FULL)
        fail(std::string(name(operation)) + " in a warp of less than 32 lanes", place);
}

struct Half {
    static void widen(const uint16_t *in, float *out) {  // 8 of them
#ifdef __F16C__
        _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(in))));
#else
        _Float16 values[8];
        memcpy(values, in, sizeof values);
        for (int i = 0; i < 8; ++i) out[i] = values[i];
#endif
    }
};
struct Bfloat16 {
    static void widen(const uint16_t *in, float *out) {
        uint32_t bits[8];
        for (int i = 0; i < 8; ++i) bits[i] = uint32_t(in[i]) << 16;
        memcpy(out, bits, sizeof bits);
    }
};

struct MmaOperand {
    float *d;
    const uint32_t *a;
    uint32_t b[2];
};

typedef float Row __attribute__((vector_size(32)));  // of B or D

template <class Format> static void multiply(Warp &warp, uint32_t, Place) {
    uint32_t a_pairs[16][8];    // [row][k / 2]
    uint16_t b_bits[16][8];     // [k][column]
    float d[16][8];
    auto operand_of = [&](unsigned lane) { return static_cast<MmaOperand *>(warp.lane(lane).operand); };
    for (unsigned lane = 0; lane < WARP; ++lane) {
        const MmaOperand &operand = *operand_of(lane);
        const unsigned g = lane / 4, t = lane % 4;
        a_pairs[g][t] = operand.a[0];
        a_pairs[g + 8][t] = operand.a[1];
        a_pairs[g][t + 4] = operand.a[2];
        a_pairs[g + 8][t + 4] = operand.a[3];
        for (unsigned half = 0; half < 2; ++half) {
            b_bits[2 * t + 8 * half][g] = operand.b[half] & 0xffff;
            b_bits[2 * t + 8 * half + 1][g] = operand.b[half] >> 16;
            memcpy(&d[g + 8 * half][2 * t], operand.d + 2 * half, 8);
        }
    }
    Row b[16];
    for (unsigned k = 0; k < 16; ++k) {
        float row[8];
        Format::widen(b_bits[k], row);
        memcpy(&b[k], row, sizeof row);
    }
    for (unsigned row = 0; row < 16; ++row) {
        float a[16];
        uint16_t a_bits[16];
        memcpy(a_bits, a_pairs[row], sizeof a_bits);
        Format::widen(a_bits, a);
        Format::widen(a_bits + 8, a + 8);
        Row sum;
        memcpy(&sum, d[row], sizeof sum);
        for (unsigned k = 0; k < 16; ++k) sum += a[k] * b[k];
        memcpy(d[row], &sum, sizeof sum);
    }
    for (unsigned lane = 0; lane < WARP; ++lane)
        for (unsigned half = 0; half < 2; ++half)
            memcpy(operand_of(lane)->d + 2 * half, &d[lane / 4 + 8 * half][2 * (lane % 4)], 8);
}

template <class Format>
static void mma(float *d, const uint32_t *a, uint32_t b0, uint32_t b1, Place place) {
    need_whole_warp(Operation::Mma, place);
    MmaOperand operand{d, a, {b0, b1}};
    meet(Operation::Mma, FULL, &operand, place, multiply<Format>);
}

void mma_m16n8k16_f16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1, Place place) {
    mma<Half>(d, a, b0, b1, place);
}
void mma_m16n8k16_bf16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1, Place place) {
    mma<Bfloat16>(d, a, b0, b1, place);
}

struct LdmatrixOperand {
    uint32_t *d;
    unsigned count;
    const void *row;
    bool transpose;
};

static void load_matrices(Warp &warp, uint32_t, Place place) {
    auto operand_of = [&](unsigned lane) { return static_cast<LdmatrixOperand *>(warp.lane(lane).operand); };
    const unsigned count = operand_of(0)->count;
    for (unsigned i = 0; i < count; ++i) {
        uint16_t matrix[8][8];
        for (unsigned row = 0; row < 8; ++row) {
            const void *p = operand_of(8 * i + row)->row;
            if (reinterpret_cast<uintptr_t>(p) % 16) fail("misaligned row of ldmatrix", place);
            memcpy(matrix[row], p, 16);
        }
        for (unsigned lane = 0; lane < WARP; ++lane) {
            const LdmatrixOperand &operand = *operand_of(lane);
            const unsigned g = lane / 4, t = lane % 4;
            operand.d[i] = operand.transpose ? matrix[2 * t][g] | uint32_t(matrix[2 * t + 1][g]) << 16
                                             : matrix[g][2 * t] | uint32_t(matrix[g][2 * t + 1]) << 16;
        }
    }
}

void ldmatrix(uint32_t *d, unsigned count, const void *row, bool transpose, Place place) {
    need_whole_warp(Operation::Ldmatrix, place);
    if (count != 1 && count != 2 && count != 4) fail("ldmatrix loads 1, 2, or 4 matrices", place);
    LdmatrixOperand operand{d, count, row, transpose};
    meet(Operation::Ldmatrix, FULL, &operand, place, load_matrices);
}

static void transpose(Warp &warp, uint32_t, Place) {
    auto operand_of = [&](unsigned lane) { return static_cast<uint32_t *>(warp.lane(lane).operand); };
    uint16_t matrix[8][8];
    for (unsigned lane = 0; lane < WARP; ++lane) memcpy(&matrix[lane / 4][2 * (lane % 4)], operand_of(lane), 4);
    for (unsigned lane = 0; lane < WARP; ++lane) {
        const unsigned g = lane / 4, t = lane % 4;
        *operand_of(lane) = matrix[2 * t][g] | uint32_t(matrix[2 * t + 1][g]) << 16;
    }
}

uint32_t movmatrix(uint32_t row, Place place) {
    need_whole_warp(Operation::Movmatrix, place);
    meet(Operation::Movmatrix, FULL, &row, place, transpose);
    return row;
}

}  // namespace emulator
