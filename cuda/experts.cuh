// Which expert a block multiplies with which rows of x, and what becomes of gate and up.
#pragma once
#include "device.cuh"

namespace cq {

// An expert as kernels read it: of one that does not exist the first, so that loads stay where they may.
struct ChosenExpert {
    uint32_t index;
    bool exists;

    template <class Params> __device__ __forceinline__ ChosenExpert(const Params &p, uint32_t id) : index(id < p.experts ? id : 0), exists(id < p.experts) {}

    // Row `row` of its matrix, or of its biases, in the stack of all.
    __device__ __forceinline__ size_t row(const CqMatrix &matrix, uint32_t row) const { return size_t(index) * matrix.rows + row; }

    template <class Params> __device__ __forceinline__ float global_scale(const Params &p, int operand) const {
        const float *scales = p.global_scale[operand];
        return p.operand[operand].matrix.global_scale * (scales ? scales[index] : 1.f);
    }

    template <class Params> __device__ __forceinline__ float with_bias(const Params &p, int operand, uint32_t row_, float product) const {
        const CqOperand &of = p.operand[operand];
        return of.bias ? product + load_float(of.bias, row(of.matrix, row_), of.bias_dtype) : product;
    }
};

// A sum times a factor, and a residual if there is one.
__device__ __forceinline__ float added(float factor, float sum, const void *residual, size_t at, uint32_t dtype) {
    sum = __fmul_rn(sum, factor);
    return residual ? __fadd_rn(sum, load_float(residual, at, dtype)) : sum;
}

__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fc00000u); }

// The outputs of the gate and up projections, joined. NaN stays NaN, which fminf and fmaxf would drop.
template <class Params> __device__ __forceinline__ float joined(const Params &p, float gate, float up) {
    if (p.gating == CQ_CLAMPED) {
        gate = gate > p.limit ? p.limit : gate;
        up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
        return gate / (1.f + expf(-p.alpha * gate)) * (up + 1.f);
    }
    return gate / (1.f + expf(-gate)) * up;
}

// The pairs of a block: those of tile blockIdx.y, or, if pairs are ungrouped, a single pair.
struct Pairs {
    CqTile tile;
    const uint32_t *order;

    // An id out of range is left as it is, or has become the number of experts.
    __device__ __forceinline__ Pairs(const CqExperts &p, uint32_t index) : order(p.order) {
        if (!order)
            tile = {p.ids[index], index, 1};
        else if (index < *p.tile_count)
            tile = p.tiles[index];
        else
            tile = {0, 0, 0};
    }
    __device__ __forceinline__ uint32_t pair(uint32_t i) const { return order ? order[tile.first + i] : tile.first + i; }
};

}  // namespace cq
