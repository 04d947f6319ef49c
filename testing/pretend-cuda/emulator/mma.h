// Tensor cores: operations of a whole warp on small matrices, with the fragments of the PTX manual.
#pragma once
#include <cstdint>

#include "scheduler.h"

namespace emulator {

// d += A B for A 16x16 and B 16x8, products exact, sums in float in the order of k. Lane 4g + t holds
//   a[0..4]  A[g][2t, 2t+1], A[g+8][2t, 2t+1], A[g][2t+8, 2t+9], A[g+8][2t+8, 2t+9]
//   b0, b1   B[2t, 2t+1][g], B[2t+8, 2t+9][g]
//   d[0..4]  D[g][2t, 2t+1], D[g+8][2t, 2t+1]
void mma_m16n8k16_f16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1, Place place = Place::here());
void mma_m16n8k16_bf16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1, Place place = Place::here());

// Loads COUNT (1, 2, or 4) matrices of 8x8 16-bit elements: lane 8i + r points at row r of matrix i, which
// is 16-byte aligned; lane 4g + t gets elements [g][2t, 2t+1], or with `transpose` [2t, 2t+1][g], of each.
void ldmatrix(uint32_t *d, unsigned count, const void *row, bool transpose, Place place = Place::here());

// movmatrix.m8n8.trans.b16: lane 4g + t gives elements 2t and 2t + 1 of row g, and gets those of column g.
uint32_t movmatrix(uint32_t row, Place place = Place::here());

}  // namespace emulator
