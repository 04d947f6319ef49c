#include "async_copy.h"

#include <cstring>

namespace emulator {

void wait_for_copies(unsigned pending) {
    Thread &self = *current;
    size_t kept = 0;
    for (const AsyncCopy &copy : self.copies) {
        if (copy.group + pending >= self.copy_groups) {
            self.copies[kept++] = copy;
            continue;
        }
        memcpy(copy.to, copy.from, copy.bytes);
        memset(static_cast<char *>(copy.to) + copy.bytes, 0, copy.zeros);
    }
    self.copies.resize(kept);
}

}  // namespace emulator
