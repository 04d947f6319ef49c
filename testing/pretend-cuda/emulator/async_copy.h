// cp.async: what is copied arrives when it is waited for, not before, so that a missing wait shows. Until then, from the
// start of the copy, there is poison. What has arrived is for the thread that waited, and for others from the next
// barrier on: __syncwarp for the lanes of its warp, __syncthreads for all. Operations of a warp such as mma or shuffles are
// no barriers.
#pragma once
#include <cstdint>

#include "scheduler.h"

namespace emulator {

// cp.async of `bytes` (4, 8, or 16), of which those past the first `source_bytes` are zeros.
void copy_async(void *shared, const void *global, unsigned bytes, unsigned source_bytes, Place place = Place::here());
inline void copy_async(void *shared, const void *global, unsigned bytes, Place place = Place::here()) {
    copy_async(shared, global, bytes, bytes, place);
}

// cp.async.commit_group
inline void commit_copies() { ++current->copy_groups; }

// cp.async.wait_group: all but the last `pending` groups have arrived.
void wait_for_copies(unsigned pending);

// cp.async.wait_all
inline void wait_for_all_copies() {
    commit_copies();
    wait_for_copies(0);
}

// The running thread stops for `next`, or for the launcher (null): takes away what that may not read.
void hide_arrived(const Thread *next);
// Gives the running thread what it may read.
void show_arrived();
// What lanes of a warp copied is for all lanes.
void publish_arrived(Warp &warp, uint32_t lanes);
// What threads of a block copied is for all threads.
void publish_arrived(Block &block);

}  // namespace emulator
