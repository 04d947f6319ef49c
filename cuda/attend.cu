// attend_<dtype>_d<head_dim>, attend_f32: one new token of each sequence attends to its keys, to which its own is
// appended (CqAttend).
//
// The cache has the dtype of q, k, v and y. Grid (splits of the keys, shares of query heads), 128 threads; shared memory
// for the copies of four warps, or for what they found, whichever is more, and for nine heads. Of the kernel for f32, head_dim is
// 256 at most.
#include "attend_f32.cuh"
#include "attend_half.cuh"

// Blocks of a multiprocessor, by registers: two of attention and a GEMV's fit together. Longer heads need more registers.
#define ATTEND_KERNELS(D, BLOCKS)                                                                                     \
    CQ_KERNEL(attend_f16_d##D, CqAttend, CQ_ATTEND_THREADS, BLOCKS) { cq::attend_tiles<cq::HalfRing<D, false>>(p); } \
    CQ_KERNEL(attend_bf16_d##D, CqAttend, CQ_ATTEND_THREADS, BLOCKS) { cq::attend_tiles<cq::HalfRing<D, true>>(p); }
ATTEND_KERNELS(64, 4)
ATTEND_KERNELS(80, 4)
ATTEND_KERNELS(96, 4)
ATTEND_KERNELS(128, 4)
ATTEND_KERNELS(256, 2)

CQ_KERNEL(attend_f32, CqAttend, CQ_ATTEND_THREADS, 4) { cq::attend_f32(p); }
