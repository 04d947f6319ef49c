// One tensor-core GEMV by itself, for tuning: cold, in a graph, over shapes, blocks on a multiprocessor, splits of k, and
// dependent launch or not. The kernel and its knobs are chosen when this is compiled:
//
//     nvcc -std=c++17 -O3 -arch=sm_90 -DTUNE_FORMAT='Affine<4>' -DTUNE_GROUP=64 -DTUNE_ROWS=1 [-DCQ_RING_WORDS=8] gemv.cu
#include "../../cuda/formats/all.cuh"
#include "../../cuda/gemv.cuh"
#include "harness.cuh"

using Format = cq::TUNE_FORMAT;
using Shape = cq::GemvShape<Format, TUNE_GROUP, TUNE_ROWS>;

CQ_KERNEL(tuned, CqGemv, Shape::THREADS, 2) { cq::gemv<Format, Shape>(p); }

namespace {

#define TEXT_(text) #text
#define TEXT(text) TEXT_(text)

constexpr bool FLOAT_SCALES = Format::SCALES == cq::Scale::Float;
constexpr size_t SCALE_BYTES = FLOAT_SCALES ? 2 : 1;

// As src/backend/cuda/gemv.rs has it.
size_t shared_bytes(int k) {
    const size_t of_row = 2 * size_t(k) + (Format::HAS_OFFSETS ? 16 : 8) * (k / Shape::X_GROUP) + 2 * Shape::WAITING * 4 * 8 * 16 + 4;
    return 8 * Shape::RING * Shape::STEP_BYTES + cq::StagedX<Format, Shape>::ZEROS + Shape::ROWS * of_row;
}

// As src/backend/cuda/plan.rs has it.
size_t most_shared_bytes() {
    const cudaDeviceProp &card = probe::device();
    const size_t half = card.sharedMemPerMultiprocessor / 2 - card.reservedSharedMemPerBlock, always = 48 << 10;
    return std::max(always, std::min(half, card.sharedMemPerBlockOptin));
}

struct Weights {
    size_t packed, scales;  // bytes
    Weights(int n, int k) : packed(size_t(n) * k * Format::BITS / 8), scales(size_t(n) * (k / TUNE_GROUP) * SCALE_BYTES) {}
    size_t all() const { return packed + scales * (Format::HAS_BIASES ? 2 : 1); }
};

void measure(int n, int k) {
    if (k % Shape::CHUNK) return;
    cudaFuncAttributes kernel;
    CHECK(cudaFuncGetAttributes(&kernel, tuned));
    CHECK(cudaFuncSetAttribute(tuned, cudaFuncAttributeMaxDynamicSharedMemorySize, int(most_shared_bytes())));
    const Weights bytes(n, k);
    const probe::Rotation rotation((bytes.all() + 767) / 256 * 256);
    char *memory = probe::random_memory(rotation.all()), *x = probe::random_memory(size_t(TUNE_ROWS) * k * 2);
    char *y = probe::random_memory(size_t(TUNE_ROWS) * n * 2);
    const int blocks = (n + Shape::ROWS_PER_BLOCK - 1) / Shape::ROWS_PER_BLOCK, rounds = (k + Shape::ROUND - 1) / Shape::ROUND;
    // Blocks on each multiprocessor that take turns, 0 for as many as there are blocks of rows; k is split for the latter alone.
    const int cases[][2] = {{0, 1}, {1, 1}, {2, 1}, {0, 2}};
    for (auto [resident, splits] : cases) {
        const int k_per_split = (rounds + splits - 1) / splits * Shape::ROUND;
        if ((k + k_per_split - 1) / k_per_split != splits || shared_bytes(k_per_split) > most_shared_bytes()) continue;
        float *partial;
        uint32_t *arrivals;
        CHECK(cudaMalloc(&partial, sizeof(float) * splits * blocks * (Shape::ROWS_PER_BLOCK + 1) * Shape::ROWS));
        CHECK(cudaMalloc(&arrivals, sizeof *arrivals * blocks));
        CHECK(cudaMemset(arrivals, 0, sizeof *arrivals * blocks));
        CHECK(cudaDeviceSynchronize());
        auto params = [&](int copy) {
            CqGemv p = {};
            const char *from = memory + rotation.offset(copy);
            CqMatrix &matrix = p.operand[0].matrix;
            matrix.packed = reinterpret_cast<const uint32_t *>(from);
            matrix.scales = from + (bytes.packed + 255) / 256 * 256;
            matrix.biases = static_cast<const char *>(matrix.scales) + (bytes.scales + 255) / 256 * 256;
            matrix.global_scale = 1;
            matrix.rows = n;
            matrix.scale_dtype = matrix.biases_dtype = CQ_BF16;
            p.operand[0].y = y, p.operand[0].y_stride = n;
            p.x = x, p.x_stride = k, p.x_dtype = CQ_BF16;
            p.partial = partial, p.arrivals = arrivals;
            p.operands = 1, p.m = TUNE_ROWS, p.k = k, p.k_per_split = k_per_split, p.finish.factor = 1, p.blocks = blocks;
            return p;
        };
        const int present = resident ? std::min(blocks, resident * probe::device().multiProcessorCount) : blocks;
        double us[2];
        for (bool early : {false, true}) {
            const probe::Launch launch{dim3(present, splits), Shape::THREADS, shared_bytes(k_per_split), early};
            us[early] = probe::time_in_graph(rotation.launches, [&](int i) { launch(tuned, params(i)); });
        }
        const size_t moved = bytes.all() + size_t(TUNE_ROWS) * (n + k) * 2;
        probe::record("gemv", "\"format\": \"" TEXT(TUNE_FORMAT) " g" TEXT(TUNE_GROUP) "\", \"m\": %d, \"n\": %d, \"k\": %d, \"splits\": %d, \"blocks\": %d, "
                      "\"resident_blocks\": %d, \"ring_words\": %d, \"registers\": %d, \"local_bytes\": %d, \"us\": %.3f, \"us_dependent\": %.3f, \"gb_per_s\": %.0f, \"gb_per_s_dependent\": %.0f",
                      TUNE_ROWS, n, k, splits, present * splits, resident, CQ_RING_WORDS, kernel.numRegs, int(kernel.localSizeBytes), us[0], us[1], moved / us[0] / 1e3, moved / us[1] / 1e3);
        CHECK(cudaFree(partial));
        CHECK(cudaFree(arrivals));
    }
    for (char *one : {memory, x, y}) CHECK(cudaFree(one));
}

}  // namespace

int main() {
    const int shapes[][2] = {{4096, 4096}, {2560, 4096}, {28672, 4096}, {4096, 14336}, {57344, 8192}, {8192, 28672}};
    for (auto [n, k] : shapes) measure(n, k);
}
