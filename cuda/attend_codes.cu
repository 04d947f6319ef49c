// attend_k<bits>_v<bits>_d<head_dim>: one new token of each sequence attends to its keys, to which its own is appended
// (CqAttend), in a cache of codes.
//
// q, k, v and y are of any dtype. Grid and threads as in attend.cu; shared memory for the copies of four warps and a tile of values
// of each, or for what they found and the outputs, whichever is more, and for what is placed.
#include "attend_codes.cuh"

#define ATTEND_KERNEL(D, K, V, BLOCKS) \
    CQ_KERNEL(attend_k##K##_v##V##_d##D, CqAttend, CQ_ATTEND_THREADS, BLOCKS) { cq::attend_tiles<cq::CodeRing<D, K, V>>(p); }
#define ATTEND_KERNELS(D, BLOCKS) \
    ATTEND_KERNEL(D, 8, 8, BLOCKS) ATTEND_KERNEL(D, 8, 4, BLOCKS) ATTEND_KERNEL(D, 4, 8, BLOCKS) ATTEND_KERNEL(D, 4, 4, BLOCKS)
ATTEND_KERNELS(64, 4)
ATTEND_KERNELS(80, 4)
ATTEND_KERNELS(96, 4)
ATTEND_KERNELS(128, 4)
ATTEND_KERNELS(256, 2)
