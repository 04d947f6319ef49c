// What becomes of finished outputs.
#pragma once
#include "device.cuh"

namespace cq {

__device__ __forceinline__ float activated(uint32_t activation, float x) {
    switch (activation) {
    case CQ_ACTIVATION_SILU: return x / (1.f + expf(-x));
    case CQ_ACTIVATION_GELU: return 0.5f * x * (1.f + erff(x * 0.70710678118654752f));
    case CQ_ACTIVATION_GELU_TANH: return 0.5f * x * (1.f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case CQ_ACTIVATION_RELU2: return x < 0 ? 0.f : x * x;
    default: return x;
    }
}

// All that comes behind the activation.
__device__ __forceinline__ float finished(const CqFinish &finish, float x) {
    if (finish.limit > 0) x = x > finish.limit ? finish.limit : x < -finish.limit ? -finish.limit : x;  // NaN stays
    x *= finish.factor;
    return finish.softcap > 0 ? finish.softcap * tanhf(x / finish.softcap) : x;
}

}  // namespace cq
