// Static shared memory of the kernels, if there were any, lay between this variable and the one of `shared_end.cpp`: a
// linker keeps thread-local variables in the order of the objects they come from.
extern __thread unsigned char emulator_shared_begin[128];
// No more: a library that is loaded late gets no larger alignment for what each thread has.
alignas(64) __thread unsigned char emulator_shared_begin[128];
