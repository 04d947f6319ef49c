#include "async_copy.h"

#include <cstring>

#include "memory.h"

namespace emulator {

static void hide(std::vector<Arrived> &all) {
    for (Arrived &arrived : all) {
        memcpy(arrived.bytes, arrived.to, arrived.size);
        fill_with_poison(arrived.to, arrived.size);
    }
}

static void show(const std::vector<Arrived> &all) {
    for (const Arrived &arrived : all) memcpy(arrived.to, arrived.bytes, arrived.size);
}

static void show(Warp &warp) {
    if (warp.hidden) show(warp.arrived);
    warp.hidden = false;
}

static void forget(std::vector<Arrived> &all, const unsigned char *begin, unsigned size) {
    for (size_t i = 0; i < all.size();) {
        if (all[i].to < begin + size && begin < all[i].to + all[i].size) {
            all[i] = all.back();
            all.pop_back();
        } else {
            ++i;
        }
    }
}

void copy_async(void *shared, const void *global, unsigned bytes, unsigned source_bytes, Place place) {
    if (bytes != 4 && bytes != 8 && bytes != 16) fail("cp.async copies 4, 8, or 16 bytes", place);
    if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % bytes)
        fail("misaligned cp.async", place);
    if (source_bytes > bytes) fail("cp.async with more source bytes than bytes", place);
    Thread &self = *current;
    const auto to = static_cast<unsigned char *>(shared);
    if (self.block->any_arrived) {
        forget(self.arrived, to, bytes);
        forget(self.warp->arrived, to, bytes);
    }
    fill_with_poison(to, bytes);
    AsyncCopy copy{to, global, source_bytes, bytes - source_bytes, self.copy_groups};
    copy.early = started_early() && !has_waited(self);
    if (copy.early) memcpy(copy.before, global, source_bytes);
    self.copies.push_back(copy);
}

void wait_for_copies(unsigned pending) {
    Thread &self = *current;
    size_t kept = 0;
    for (const AsyncCopy &copy : self.copies) {
        if (copy.group + pending >= self.copy_groups) {
            self.copies[kept++] = copy;
            continue;
        }
        const auto to = static_cast<unsigned char *>(copy.to);
        memcpy(to, copy.early ? copy.before : copy.from, copy.bytes);
        memset(to + copy.bytes, 0, copy.zeros);
        forget(self.arrived, to, copy.bytes + copy.zeros);
        self.arrived.push_back({to, copy.bytes + copy.zeros, {}});
        self.block->any_arrived = true;
    }
    self.copies.resize(kept);
}

void hide_arrived(const Thread *next) {
    hide(current->arrived);
    Warp &warp = *current->warp;
    if (next && next->warp == &warp) return;
    hide(warp.arrived);
    warp.hidden = true;
}

void show_arrived() {
    show(*current->warp);
    show(current->arrived);
}

void publish_arrived(Warp &warp, uint32_t lanes) {
    for (uint32_t left = lanes; left; left &= left - 1) {
        Thread &thread = warp.lane(__builtin_ctz(left));
        if (&thread != current) show(thread.arrived);
        warp.arrived.insert(warp.arrived.end(), thread.arrived.begin(), thread.arrived.end());
        thread.arrived.clear();
    }
}

void publish_arrived(Block &block) {
    for (unsigned w = 0; w * WARP < block.size; ++w) {
        show(block.warps[w]);
        block.warps[w].arrived.clear();
    }
    for (unsigned i = 0; i < block.size; ++i) {
        Thread &thread = block.threads[i];
        if (&thread != current) show(thread.arrived);
        thread.arrived.clear();
    }
    block.any_arrived = false;
}

}  // namespace emulator
