// tiles_<format>_{c32,c128}: see tiles.cuh.
#include "tiles.cuh"

CQ_TILES_AFFINE_4_TO_8(CQ_TILES_KERNELS)
