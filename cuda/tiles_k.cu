// tiles_<format>_{c32,c128}: see tiles.cuh.
#include "tiles.cuh"

CQ_TILES_K(CQ_TILES_KERNELS)
