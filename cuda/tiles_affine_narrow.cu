// tiles_<format>_{c32,c128}: see tiles.cuh.
#include "tiles.cuh"

CQ_TILES_AFFINE_1_TO_3(CQ_TILES_KERNELS)
