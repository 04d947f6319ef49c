// Loads and stores of kernels where there is no memory.
#pragma once

namespace emulator {

// From here on, they are faults of the launch, not the end of the process.
void diagnose_illegal_addresses();

}  // namespace emulator
