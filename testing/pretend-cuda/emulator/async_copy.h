// cp.async: what is copied arrives when it is waited for, not before, so that a missing wait shows.
#pragma once
#include <cstdint>

#include "scheduler.h"

namespace emulator {

// cp.async of `bytes` (4, 8, or 16), of which those past the first `source_bytes` are zeros.
inline void copy_async(void *shared, const void *global, unsigned bytes, unsigned source_bytes,
                       Place place = Place::here()) {
    if (bytes != 4 && bytes != 8 && bytes != 16) fail("cp.async copies 4, 8, or 16 bytes", place);
    if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % bytes)
        fail("misaligned cp.async", place);
    if (source_bytes > bytes) fail("cp.async with more source bytes than bytes", place);
    Thread &self = *current;
    self.copies.push_back({shared, global, source_bytes, bytes - source_bytes, self.copy_groups});
}
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

}  // namespace emulator
