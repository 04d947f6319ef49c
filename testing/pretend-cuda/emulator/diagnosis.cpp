#include "diagnosis.h"

#include <cstdio>
#include <cstring>

namespace emulator {

const char *name(Operation operation) {
    switch (operation) {
    case Operation::Syncthreads: return "__syncthreads";
    case Operation::Syncwarp: return "__syncwarp";
    case Operation::Shfl: return "__shfl_sync";
    case Operation::ShflXor: return "__shfl_xor_sync";
    case Operation::ShflUp: return "__shfl_up_sync";
    case Operation::ShflDown: return "__shfl_down_sync";
    case Operation::Ballot: return "__ballot_sync";
    case Operation::Any: return "__any_sync";
    case Operation::All: return "__all_sync";
    case Operation::Mma: return "mma";
    case Operation::Ldmatrix: return "ldmatrix";
    case Operation::Movmatrix: return "movmatrix";
    }
    return "?";
}

std::string describe(Place place) {
    const char *slash = strrchr(place.file, '/');
    const std::string file = slash ? slash + 1 : place.file;
    return place.line ? file + ":" + std::to_string(place.line) : file;
}

static std::string tuple(unsigned x, unsigned y, unsigned z) {
    return "(" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
}

std::string describe(const Block &block) {
    return std::string("kernel `") + block.kernel->name + "`, block " +
           tuple(block.index.x, block.index.y, block.index.z);
}

std::string describe(const Thread &thread) {
    return describe(*thread.block) + ", thread " + tuple(thread.index.x, thread.index.y, thread.index.z);
}

static std::string whereabouts(const Block &block, unsigned i) {
    const Warp &warp = block.warps[i / WARP];
    const uint32_t me = 1u << i % WARP;
    if (warp.left & me) return "left the kernel";
    if (warp.at_barrier & me) return "wait at __syncthreads, " + describe(block.barrier);
    for (unsigned m = 0; m < warp.open; ++m) {
        const Meeting &meeting = warp.meetings[m];
        if (!(meeting.arrived & me)) continue;
        char mask[16];
        snprintf(mask, sizeof mask, "%08x", meeting.mask);
        return std::string("wait at ") + name(meeting.operation) + ", " + describe(meeting.place) + ", mask " + mask;
    }
    return "have not arrived";
}

std::string describe_threads(const Block &block) {
    std::string all;
    for (unsigned i = 0; i < block.size;) {
        const std::string here = whereabouts(block, i);
        unsigned last = i;
        while (last + 1 < block.size && whereabouts(block, last + 1) == here) ++last;
        if (!all.empty()) all += "; ";
        all += last > i ? "threads " + std::to_string(i) + "-" + std::to_string(last) : "thread " + std::to_string(i);
        all += " " + here;
        i = last + 1;
    }
    return all;
}

}  // namespace emulator
